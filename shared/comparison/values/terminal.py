"""Print a diff by value in two columns, in the order of the run."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ...console import printable
from ...running.places import Place
from ..printing import print_trimmed
from .decoding import CacheDiff
from .rows import Row, Section

Cells = tuple[RenderableType, ...]
Numbers = Mapping[tuple[int, int], str]  # a row's value as text, by Row.order


def tables(
    sections: Iterable[Section],
    names: tuple[str, str],
    wide: bool,
    whole: bool,
    numbers: Numbers,
) -> Iterator[RenderableType]:
    """Yield the sections' titles and tables.

    In a wide terminal, the two models are next to each other. `whole` adds the
    unpaired lines. `numbers` has the entries of values to print below lines.
    """
    heads: Cells = (
        *(Text(printable(name), "bold cyan") for name in names),
        Text("shape", "dim"),
        "apart",
    )
    for section in sections:
        shown = [r for r in section.rows if whole or (r.left and r.right)]
        if not shown:
            continue
        yield Rule(Text(section.title, "bold"), style="cyan", align="left")
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for options in ({"ratio": 1}, {"justify": "right", "no_wrap": True}):
            for _ in range(1 + wide):
                table.add_column(**options)
        rows = [heads] if heads else []
        heads = ()
        for row in shown:
            rows.append(_cells(section, row))
            if row.order in numbers:
                rows.append((Text(numbers[row.order], "dim"), *[""] * 3))
        for cells in rows:
            for part in [cells] if wide else [cells[::2], cells[1::2]]:
                table.add_row(*part)
        yield table


def show_decoding(
    console: Console, found: CacheDiff, text_of: Callable[[int], str]
) -> None:
    """Print the difference at each position, then the finding in words."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify)
    table.add_row(*(Text(w, "dim") for w in ("position", "token", "apart")))
    for position, token in enumerate(found.tokens):
        apart = found.apart[position]
        table.add_row(
            str(position),
            Text(text_of(token)),
            "not answered" if apart is None else f"{apart:.1g}",
            style="bold red" if position == found.position else "",
        )
    print_trimmed(console, table)
    colour = "bold green" if found.same else "bold red"
    console.print(Text(found.sentence, style=colour), soft_wrap=True)


def _cells(section: Section, row: Row) -> Cells:
    shape = "\u00d7".join(map(str, row.shape))
    if row.times > 1:
        shape = f"{row.times} of {shape}"
    apart = "" if row.difference is None else f"{row.difference:.1g}"
    note = Text(row.why, style="dim italic")
    left, right = (
        _line(place, section.does_more(place)) if place else note
        for place in (row.left, row.right)
    )
    return left, right, Text(shape, "dim"), apart


def _line(place: Place, name_operation: bool) -> Text:
    """Return file, line and expression, or the step inside the operation."""
    name = printable(place.file.replace("\\", "/").rpartition("/")[2])
    if place.recorded:
        return Text.assemble((f"{name} ", "dim"), printable(place.function))
    where = (f"{name}:{place.line} ", "dim")
    if place.inside:
        inside = f"{place.inside}, inside {place.op}"
        return Text.assemble(where, (inside, "italic"))
    code = Syntax("", "python", theme="ansi_dark").highlight(place.code)
    code.rstrip()
    operation = f"  {place.op}" if name_operation else ""
    return Text.assemble(where, code, (operation, "italic"))
