"""A comparison as tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...tokenization.tokenizers import Tokenizer
from ..styles import Comparison
from ..text import token_text


def show_tokens(
    console: Console, tokens: Sequence[int], tokenizer: Tokenizer
) -> None:
    """Print ids over their pieces, as many as fit in two lines."""
    pieces = [Text(token_text(tokenizer, i), style="cyan") for i in tokens]
    ids = [Text(str(i), style="dim") for i in tokens]
    table = Table.grid(padding=(0, 1))
    width, shown = 4, 0
    for number, token in zip(ids, pieces, strict=True):
        width += max(number.cell_len, token.cell_len) + 1
        if width > console.width - 2:
            break
        shown += 1
        table.add_column()
    table.add_column()
    more = Text("..." if shown < len(tokens) else "", style="dim")
    table.add_row(*ids[:shown], more)
    table.add_row(*pieces[:shown], more)
    console.print(Padding(table, (0, 2)))


def show_comparison(
    console: Console, comparison: Comparison, tokenizer: Tokenizer
) -> None:
    """Print the tables and the verdict."""
    stages = _stage_table(comparison)
    facts = Group(
        _parameter_table(comparison),
        "",
        _next_table(comparison, tokenizer),
        "",
        _time_table(comparison),
    )
    if console.width >= 120:
        grid = Table.grid(padding=(0, 3))
        grid.add_row(stages, facts)
        console.print(grid)
    else:
        console.print(Group(stages, "", facts))
    colour = "bold green" if comparison.one_function else "bold red"
    console.print()
    console.print(Text(comparison.verdict, style=colour), soft_wrap=True)
    for part in comparison.original_parts:
        console.print(Text(str(part), style="dim"))


def _stage_table(comparison: Comparison) -> RenderableType:
    table = _table("stage", "largest difference")
    layers = comparison.config.n_layer
    for stage, difference in comparison.differences.items():
        # of a deep model the first and the last two blocks are enough
        layer = stage.split(".")[1] if stage.startswith("block.") else "0"
        if layers > 6 and 2 <= int(layer) < layers - 2:
            if stage == "block.2.attention":
                table.add_row("...", "")
            continue
        table.add_row(stage, f"{difference:.2e}")
    return table


def _parameter_table(comparison: Comparison) -> RenderableType:
    table = _table("parameters", *comparison.styles)
    for name in comparison.parameters[0]:
        if name == "block":
            continue  # its parts say more
        counts = [side[name] for side in comparison.parameters]
        cells = [f"{count:,}" for count in counts]
        if name == "head":
            cells = ["tied to embedding" if c == "0" else c for c in cells]
        title = "buffers (not trained)" if name == "buffers" else name
        table.add_row(title, *cells, style="bold" if name == "total" else None)
    return table


def _next_table(
    comparison: Comparison, tokenizer: Tokenizer
) -> RenderableType:
    table = _table("likeliest next token", *comparison.styles)
    rows = zip(*comparison.next_tokens, strict=True)
    for rank, row in enumerate(rows, start=1):
        cells = [f"{token_text(tokenizer, t)} {p:8.4%}" for t, p in row]
        table.add_row(str(rank), *map(Text, cells))
    return table


def _time_table(comparison: Comparison) -> RenderableType:
    count = comparison.threads
    threads = "1 thread" if count == 1 else f"{count} threads"
    table = _table(f"time, {threads}", *comparison.styles)
    times = [[1e3 * t for t in seconds] for seconds in comparison.seconds]
    medians = [f"{median:.2f} ms" for _, median, _ in times]
    table.add_row("forward pass, median", *medians)
    middle = [f"{first:.2f} to {third:.2f} ms" for first, _, third in times]
    table.add_row("its quartiles", *middle)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column(first, min_width=22)
    for name in others:
        table.add_column(name, justify="right", min_width=20)
    return table
