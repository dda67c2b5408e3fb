"""Results as text in a terminal.

Names and notes may hold brackets, which rich would read as its markup:
everything is handed over as Text, which it prints as it stands.
"""

from collections.abc import Iterable, Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .competitors import OWN
from .forward import COPY, OWN_MATMULS, matmul_row
from .generate import READ_ONCE
from .goals import Goal, school_cost
from .growth import growth
from .results import Change, Results, Row, Run


def show_results(results: Results) -> Group:
    """Return the machine's line, and each run with its tables."""
    facts = ", ".join(
        f"{name} {value}" for name, value in results.machine.items()
    )
    parts: list[RenderableType] = [Text(facts)]
    for run in results.runs:
        parts += ["", *_show_run(run)]
    parts += _show_growth(results.runs)
    return Group(*parts)


def _lines(texts: Iterable[str]) -> list[RenderableType]:
    return [Text(f"- {text}") for text in texts]


def _show_run(run: Run) -> list[RenderableType]:
    setting = ", ".join(
        name.replace("_", " ") if value is True else f"{name} {value}"
        for name, value in run.setting.items()
        if value is not False
    )
    title = Text.assemble((run.what, "bold"), f"  {setting}")
    if run.not_run:
        return [title, Text(f"not run: {run.not_run}")]
    shown: list[RenderableType] = [title, _speeds(run), "", _picture(run)]
    if any(row.parameters or row.first_seconds for row in run.models):
        shown += ["", _particulars(run)]
    shown += _lines(
        f"{row.name}: {row.note}" for row in run.models if row.note
    )
    shown += _lines(_school_costs(run))
    shown += _lines(_operations(row) for row in run.models if row.operations)
    asked = run.setting.get("rounds")
    rounds = max(len(row.seconds) for row in run.rows)
    if asked is not None and rounds != asked:
        shown += _lines([f"{rounds} rounds: there was no time for more"])
    return shown + _lines(run.notes)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold cyan", padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(
            Text(column), justify="right" if number else "left", no_wrap=True
        )
    return table


def _school_costs(run: Run) -> list[str]:
    """Say what the parts cost that a school writes out itself."""
    names = [row.name.removesuffix(OWN) for row in run.models]
    costs = {name: school_cost(run, name) for name in dict.fromkeys(names)}
    return [
        f"{name}{OWN}: its school's own parts take {cost:.1%} of the pass "
        "more than torch's"
        for name, cost in costs.items()
        if cost is not None
    ]


def _speeds(run: Run) -> Table:
    """Times with their quartiles, ratios, and parts of the limit."""
    ours = run.row(run.reference)
    columns = {"": [row.name for row in run.rows]}
    columns["median"] = [seconds(row.timing.median) for row in run.rows]
    columns["quartiles"] = [_spread(row) for row in run.rows]
    columns["ratio"] = [
        f"{ours.timing.ratio(row.timing)[1]:.2f}"
        if ours and not row.limit and row.tokens == ours.tokens
        else ""
        for row in run.rows
    ]
    columns["of limit"] = [
        _percent(part_of_limit(run, row)) for row in run.rows
    ]
    columns["of own"] = [_percent(part_of_own(run, row)) for row in run.rows]
    columns["tokens/s"] = [
        f"{row.tokens / row.timing.median:,.0f}" if row.tokens else ""
        for row in run.rows
    ]
    table = _filled_table(columns)
    for row, shown in zip(run.rows, table.rows, strict=True):
        shown.style = "dim" if row.limit else None
    return table


def _filled_table(columns: dict[str, list[str]]) -> Table:
    """Return a table of those columns that are not empty."""
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    table = _table(*kept)
    for cells in zip(*kept.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _picture(run: Run) -> Table:
    """A bar for each median, the longest as wide as the terminal."""
    table = _table("", "")
    table.show_header = False
    table.add_column("", ratio=1)
    longest = max(row.timing.median for row in run.models)
    for row in run.models:
        median = row.timing.median
        color = "cyan" if row.name == run.reference else "blue"
        bar = Bar(longest, 0, median, color=color)
        table.add_row(Text(row.name), seconds(median), bar)
    return table


def _particulars(run: Run) -> Table:
    """What each row gives, holds and needed at first."""
    rows = run.models
    return _filled_table(
        {
            "": [row.name for row in rows],
            "gives": [row.gives for row in rows],
            "parameters": [
                f"{row.parameters:,}" if row.parameters else "" for row in rows
            ],
            "peak memory": [
                "" if row.peak_bytes is None else _bytes(row.peak_bytes)
                for row in rows
            ],
            "first run": [
                seconds(row.first_seconds) if row.first_seconds else ""
                for row in rows
            ],
        }
    )


def _operations(row: Row) -> str:
    parts = ", ".join(
        f"{name.removeprefix('aten::')} {part:.0%}"
        for name, part in row.operations.items()
    )
    return f"{row.name}: {parts}"


def part_of_limit(run: Run, row: Row) -> float | None:
    """Return what part of the machine's limit a row reaches.

    The limit is the longer of two times: the row's operations at the rate
    of a large square product, and its least bytes at that of a large copy,
    or of a large sum where that was measured: decoding reads and hardly
    writes. The rates were measured in the same rounds. Above 1 is noise, or
    a dtype that the machine has no large products for, such as float16 on a
    CPU.

    Source: Williams et al. 2009 (Roofline).
    """
    matmul, copy = matmul_row(run), run.row(READ_ONCE) or run.row(COPY)
    times = []
    if row.flops and matmul is not None and matmul.rate:
        times.append(row.flops / matmul.rate)
    if row.moved and copy is not None and copy.bandwidth:
        times.append(row.moved / copy.bandwidth)
    return max(times) / row.timing.median if times else None


def part_of_own(run: Run, row: Row) -> float | None:
    """Return what part of the rate of the model's own products it reaches.

    None for rows that are no model, or no such products were measured.
    """
    products = run.row(OWN_MATMULS)
    if row.limit or products is None or not products.rate or not row.rate:
        return None
    return row.rate / products.rate


def _show_growth(runs: Sequence[Run]) -> list[RenderableType]:
    found = growth(runs)
    if not found:
        return []
    table = _table("growth with time", "time", "formula", "exponent")
    for g in found:
        table.add_row(
            Text(
                f"{g.name}, batch {g.batch}, {g.times[0]} to {g.times[-1]} "
                "tokens"
            ),
            f"x {g.measured:.2f}",
            f"x {g.expected:.2f}",
            f"{g.exponent:.3f}",
        )
    return [
        "",
        table,
        "- time ~ operations^exponent, by least squares of logarithms, "
        "each weighted by its operations",
    ]


def show_changes(
    changes: Sequence[Change], tolerance: float, told: Sequence[str] = ()
) -> Group:
    """Return new times over old ones, and the verdict.

    Args:
        changes: of rows that are in both results.
        tolerance: how much slower is allowed.
        told: what was not compared, and what else a reader has to know.
    """
    table = _table("", "new / old", "spread", "")
    for change in changes:
        slower = change.slower(tolerance)
        table.add_row(
            Text(f"{change.run.split(',')[0]}: {change.row.name}"),
            f"{change.ratio:.3f}",
            f"{change.low:.3f} to {change.high:.3f}",
            "slower" if slower else "",
            style="red" if slower else ("dim" if change.row.limit else None),
        )
    count = sum(change.slower(tolerance) for change in changes)
    verdict = f"{count} of {len(changes)} slower by more than {tolerance:.0%}"
    return Group("", table, *_lines(told), verdict)


def show_goals(
    columns: Sequence[Sequence[Goal]],
    names: Sequence[str],
    markdown: bool = False,
) -> RenderableType:
    """Return the table of goals, a column for each time it was measured.

    Args:
        columns: goals as `judge` gives them, always the same ones in order.
        names: of the columns.
        markdown: as text for a README.
    """
    head = ["what", "goal", *names]
    rows = [
        [
            goals[0].what,
            goals[0].goal,
            *(f"{g.measured}{_mark(g)}" for g in goals),
        ]
        for goals in zip(*columns, strict=True)
    ]
    if markdown:
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    table = _table(*head)
    for column in table.columns:
        column.justify, column.no_wrap = "left", False
        column.overflow = "fold"  # the name of a peer is one long word
    for row in rows:
        missed = any("missed" in cell for cell in row[2:])
        table.add_row(*map(Text, row), style="red" if missed else None)
    return table


def _mark(goal: Goal) -> str:
    if goal.reached is None:
        return ""
    return ", reached" if goal.reached else ", missed"


UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def seconds(value: float) -> str:
    """Return seconds as people say them."""
    unit, size = _unit(value)
    return f"{_short(value / size)} {unit}"


def _unit(value: float) -> tuple[str, float]:
    """The largest unit of which there is a whole one, or the smallest."""
    return next((u for u in UNITS if value >= u[1]), UNITS[-1])


def _short(number: float) -> str:
    """Three digits or more."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _spread(row: Row) -> str:
    """The quartiles, in the median's unit."""
    first, median, third = row.timing.quartiles
    _, size = _unit(median)
    return f"{_short(first / size)}-{_short(third / size)}"


def _bytes(count: int) -> str:
    return (
        f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
    )


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"
