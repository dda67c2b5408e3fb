"""The source of two styles in the terminal, side by side."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..sources import Pair, Part, Segment, describe

# Below this width the two columns stand one under the other.
TWO_COLUMNS = 120
ALONE = "(no counterpart)"


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
    title = Text.assemble((concept, "bold"), "  ", describe(concept, pairs))
    yield Rule(style="cyan")
    yield title
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
