"""A comparison, or the source of two styles, in the terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..console import printable
from ..tokenization.tokenizers import Tokenizer
from .concepts import CONCEPTS
from .printing import TWO_COLUMNS, print_trimmed
from .sources import Part, PartPair, Segment
from .styles import Comparison
from .text import token_text

TOKENS = 20  # that are shown
NARROW = 66  # below it the columns of tables are as narrow as their cells
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
    names = comparison.styles
    stages = _table(
        ("stage", "largest difference"),
        [(s, f"{apart:.2e}") for s, apart in comparison.differences.items()],
        console,
    )
    parameters = [
        (name, *(_count(name, side[name]) for side in comparison.parameters))
        for name in comparison.parameters[0]
        if name != "block"  # its parts say more
    ]
    ranks = enumerate(zip(*comparison.next_tokens, strict=True), start=1)
    likeliest = [
        (str(rank), *(f"{token_text(tokenizer, t)} {p:8.4%}" for t, p in row))
        for rank, row in ranks
    ]
    times = [[1e3 * t for t in seconds] for seconds in comparison.seconds]
    forward = [
        ("forward pass, median", *(f"{t[1]:.2f} ms" for t in times)),
        ("its quartiles", *(f"{t[0]:.2f} to {t[2]:.2f} ms" for t in times)),
    ]
    count = comparison.threads
    threads = "1 thread" if count == 1 else f"{count} threads"
    facts = Group(
        _table(("parameters", *names), parameters, console),
        "",
        _table(("likeliest next token", *names), likeliest, console),
        "",
        _table((f"time, {threads}", *names), forward, console),
    )
    if console.width >= TWO_COLUMNS:
        grid = Table.grid(padding=(0, 3))
        grid.add_row(stages, facts)
        console.print(grid)
    else:
        console.print(Group(stages, "", facts))
    colour = "bold green" if comparison.one_function else "bold red"
    console.print()
    console.print(
        Text(printable(comparison.verdict), style=colour),
        soft_wrap=not console.is_terminal,  # one line for a program
    )
    for part in comparison.original_parts:
        console.print(Text(part, style="dim"))


def _count(name: str, count: int) -> str:
    tied = name == "head" and count == 0
    return "tied to embedding" if tied else f"{count:,}"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], console: Console
) -> Table:
    """Return a table as wide as the others, where there is room for that."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    wide = console.width >= NARROW
    table.add_column(heads[0], min_width=22 if wide else None)
    for name in heads[1:]:
        name = printable(name)
        table.add_column(name, justify="right", min_width=20 if wide else None)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def show_sources(
    console: Console,
    names: tuple[str, str],
    sources: Mapping[str, Sequence[PartPair]],
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


def _concept(
    console: Console,
    names: tuple[str, str],
    concept: str,
    pairs: Sequence[PartPair],
) -> Iterable[RenderableType]:
    does = CONCEPTS[concept].does if concept in CONCEPTS else ""
    yield Rule(style="cyan")
    yield Text.assemble((concept, "bold"), "  ", does)
    yield ""
    for pair in pairs:
        parts = pair.left, pair.right
        heads = [_head(n, part) for n, part in zip(names, parts, strict=True)]
        if console.width >= TWO_COLUMNS:
            table = Table.grid(padding=(0, 1), expand=True)
            table.add_column(ratio=1)
            table.add_column(width=1)
            table.add_column(ratio=1)
            table.add_row(heads[0], "", heads[1])
            for left, right in pair.rows:
                table.add_row(_code(left), "", _code(right))
                table.add_row()
            yield table
        else:
            for head, part in zip(heads, parts, strict=True):
                yield head
                yield from map(_code, part.segments if part else ())
                yield ""


def _head(style: str, part: Part | None) -> Text:
    if part is None:
        return Text(f"{style}  {ALONE}", style="dim")
    line = part.segments[0].line
    return Text.assemble(
        (part.name, "bold cyan"), "  ", (f"{part.file}:{line}", "dim")
    )


def _code(segment: Segment | None) -> RenderableType:
    """Source next to its line numbers; a long line is folded, never cut."""
    if segment is None:
        return ""
    return Syntax(
        segment.code,
        "python",
        theme="ansi_dark",
        line_numbers=True,
        start_line=segment.line,
        word_wrap=True,
    )
