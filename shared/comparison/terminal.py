"""A comparison as tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..tokenization.tokenizers import Tokenizer
from .styles import Comparison


def show_tokens(
    console: Console, tokens: Sequence[int], tokenizer: Tokenizer
) -> None:
    """Print ids over their pieces, as many as fit in two lines."""
    pieces = [Text(piece(tokenizer, i), style="cyan") for i in tokens]
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
    for name, moved, why in comparison.schools_own:
        console.print(
            Text(f"with {name}: {moved:.2g} apart. {why}", style="dim")
        )


def piece(tokenizer: Tokenizer, token: int) -> str:
    """Return what one id stands for, so that every piece can be seen."""
    if token >= tokenizer.n_vocab:
        return "(no token)"
    try:
        data = tokenizer.decode_bytes([token])
    except ValueError:
        return "(no token)"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data.hex(" ")
    return visible(text).replace(" ", "\u00b7")


def visible(text: str) -> str:
    """Spell out what cannot be printed; spaces stay."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _stage_table(comparison: Comparison) -> RenderableType:
    table = _table("largest difference", "", right=1)
    layers = comparison.config.n_layer
    for stage, difference in comparison.differences.items():
        # of a deep model the first and the last two blocks tell enough
        layer = stage.split(".")[1] if stage.startswith("block.") else "0"
        if layers > 6 and 2 <= int(layer) < layers - 2:
            if stage == "block.2.attention":
                table.add_row("...", "")
            continue
        table.add_row(stage, f"{difference:.2e}")
    return table


def _parameter_table(comparison: Comparison) -> RenderableType:
    left, right = comparison.parameters
    table = _table("parameters", *comparison.styles, right=2)
    for name in left:
        style = "bold" if name == "total" else None
        table.add_row(name, f"{left[name]:,}", f"{right[name]:,}", style=style)
    return table


def _next_table(
    comparison: Comparison, tokenizer: Tokenizer
) -> RenderableType:
    table = _table("next token", *comparison.styles, right=2)
    rows = zip(*comparison.next_tokens, strict=True)
    for rank, row in enumerate(rows, start=1):
        cells = [f"{piece(tokenizer, t)} {p:8.4%}" for t, p in row]
        table.add_row(Text(str(rank)), *map(Text, cells))
    return table


def _time_table(comparison: Comparison) -> RenderableType:
    table = _table("one forward", *comparison.styles, right=2)
    cells = [f"{seconds * 1e3:.2f} ms" for seconds in comparison.seconds]
    table.add_row("median", *cells)
    return table


def _table(first: str, *others: str, right: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column(first, min_width=22)
    for name in others:
        table.add_column(name, justify="right", min_width=20)
    return table
