"""Print a comparison, or the source of two styles, in a terminal."""

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

TOKENS = 20  # most tokens of the text to show
LAST = 3  # last tokens of the text to show before likely next ones
NARROW = 66  # in a narrower terminal, tables are only as wide as their cells
ALONE = "(no counterpart)"


def show_tokens(
    console: Console, tokens: Sequence[int], tokenizer: Tokenizer
) -> None:
    """Print the first ids, each above its text."""
    cells = [
        Text.assemble(
            (str(i), "dim"), "\n", (token_text(tokenizer, i), "cyan")
        )
        for i in tokens[:TOKENS]
    ]
    more = [Text("...", "dim")] if len(tokens) > TOKENS else []
    console.print(Columns(cells + more, padding=(0, 1)))


def show_comparison(
    console: Console,
    comparison: Comparison,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
) -> None:
    """Print the tables and the verdict of a comparison on some tokens."""
    names = comparison.styles
    stages = _table(
        ("stage", "largest difference"),
        [(s, f"{apart:.2e}") for s, apart in comparison.differences.items()],
        console,
    )
    parameters = [
        (name, *(_count(name, side[name]) for side in comparison.parameters))
        for name in comparison.parameters[0]
        if name != "block"  # rows for the parts of a block say more
    ]
    tail = "".join(token_text(tokenizer, i) for i in tokens[-LAST:])
    likeliest = [
        ("after", *(f"...{tail}" for _ in names)),
        *_likeliest(comparison, tokenizer),
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
        # do not wrap in a pipe, so that a program gets one line
        soft_wrap=not console.is_terminal,
    )
    for part in comparison.original_parts:
        console.print(Text(part, style="dim"))


def _likeliest(
    comparison: Comparison, tokenizer: Tokenizer
) -> list[tuple[str, ...]]:
    ranks = enumerate(zip(*comparison.next_tokens, strict=True), start=1)
    return [
        (str(rank), *(f"{token_text(tokenizer, t)} {p:8.4%}" for t, p in row))
        for rank, row in ranks
    ]


def _count(name: str, count: int) -> str:
    tied = name == "head" and count == 0
    return "tied to embedding" if tied else f"{count:,}"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], console: Console
) -> Table:
    """Return a table, as wide as other tables if there is room."""
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

    In a terminal, a source that is longer than the screen opens in a pager.
    """
    blocks = [
        block
        for concept, pairs in sources.items()
        for block in _concept(console, names, concept, pairs)
    ]
    everything = Group(*blocks)
    lines = console.render_lines(everything)
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
    """Return source with its line numbers; long lines wrap."""
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
