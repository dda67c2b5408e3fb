"""A comparison, or the source of two styles, in the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..tokenization.tokenizers import Tokenizer
from .concepts import CONCEPTS
from .sources import Pair, Part, Segment
from .styles import Comparison
from .text import token_text

TOKENS = 24  # that are shown
# Below this width the two columns stand one under the other.
TWO_COLUMNS = 120
ALONE = "(no counterpart)"


def show_tokens(
    console: Console, tokens: Sequence[int], tokenizer: Tokenizer
) -> None:
    """Print the first ids over their pieces."""
    cells = [
        Text.assemble(
            (str(i), "dim"), "\n", (token_text(tokenizer, i), "cyan")
        )
        for i in tokens[:TOKENS]
    ]
    more = [Text("...", "dim")] if len(tokens) > TOKENS else []
    console.print(Columns(cells + more, padding=(0, 1)))


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
        console.print(Text(part, style="dim"))


def _stage_table(comparison: Comparison) -> RenderableType:
    table = _table("stage", "largest difference")
    for stage, difference in comparison.differences.items():
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


def show_sources(
    console: Console,
    names: tuple[str, str],
    sources: Mapping[str, Sequence[Pair]],
) -> None:
    """Print both styles' source, concept by concept.

    A terminal gets a pager where the source is longer than it is high.
    """
    blocks = [
        block
        for concept, pairs in sources.items()
        for block in _concept(console, names, concept, pairs)
    ]
    everything = Group(*blocks)
    lines = console.render_lines(everything, pad=False)
    if console.is_terminal and len(lines) > console.height:
        with console.pager(styles=True):
            console.print(everything)
    elif console.is_terminal:
        console.print(everything)
    else:
        print_trimmed(console, everything)


def print_trimmed(console: Console, *blocks: RenderableType) -> None:
    """Print without spaces at the end of lines."""
    with console.capture() as capture:
        console.print(*blocks, sep="\n")
    for line in capture.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def _concept(
    console: Console,
    names: tuple[str, str],
    concept: str,
    pairs: Sequence[Pair],
) -> Iterable[RenderableType]:
    does = CONCEPTS[concept].does if concept in CONCEPTS else ""
    yield Rule(style="cyan")
    yield Text.assemble((concept, "bold"), "  ", does)
    yield ""
    for pair in pairs:
        parts = pair.left, pair.right
        heads = [_head(n, part) for n, part in zip(names, parts, strict=True)]
        if console.width >= TWO_COLUMNS:
            yield _beside([heads, *map(_codes, pair.rows)])
            yield ""
        else:
            for head, part in zip(heads, parts, strict=True):
                yield head
                if part is not None:
                    yield _code(part.segments)
                yield ""


def _beside(rows: Iterable[Sequence[RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(ratio=1)
    table.add_column(width=1, style="dim")
    table.add_column(ratio=1)
    for number, (left, right) in enumerate(rows):
        if number > 1:
            table.add_row("", "", "")
        table.add_row(left, "", right)
    return table


def _head(style: str, part: Part | None) -> Text:
    if part is None:
        return Text(f"{style}  {ALONE}", style="dim")
    line = part.segments[0].line
    return Text.assemble(
        (part.name, "bold cyan"), "  ", (f"{part.file}:{line}", "dim")
    )


def _codes(row: tuple[Segment | None, Segment | None]) -> list[Any]:
    return [_code([s]) if s else "" for s in row]


def _code(segments: Sequence[Segment]) -> Table:
    """Source beside its line numbers; a long line is folded, never cut."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", style="dim", no_wrap=True, min_width=3)
    table.add_column(overflow="fold")
    for number, segment in enumerate(segments):
        if number:
            table.add_row("", "")
        syntax = Syntax("", "python", theme="ansi_dark")
        text = syntax.highlight(segment.code)
        text.rstrip()
        for line, code in enumerate(text.split("\n"), start=segment.line):
            code.no_wrap = False
            code.overflow = "fold"
            table.add_row(str(line), code)
    return table
