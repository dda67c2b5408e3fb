"""Results as text in a terminal.

Names and notes may hold brackets, which rich would read as its markup:
everything is handed over as Text, which it prints as it stands.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch.utils.benchmark import select_unit

from gpt_duet.comparison.benchmark_results import Results, Row, Run

from .compare import Change

LEGEND = (
    "x NAME: how many times NAME's time in the same round, the median over "
    "the rounds; 1.20 takes a fifth longer",
    "least, 95th: the least time of a round, and the 95th percentile",
    "operations: floating-point, counted; bytes: that a run must move at "
    "least: weights it reads, scores it writes",
    "of peak: the least time in which this machine could do the row's work "
    "(its operations at the best speed of the matmul, or its bytes at that of "
    "the copy or read, whichever takes longer), in percent of the row's time",
    "peak memory: beyond the weights; first run: with warming up and "
    "compiling",
    "parameters differ where a head is not tied to its embedding, or a "
    "position table is not trained",
)


def show_results(results: Results) -> Group:
    """Return the machine's line, each run with its tables, and a legend."""
    facts = ", ".join(f"{k} {v}" for k, v in results.machine.items())
    parts: list[RenderableType] = [Text(facts)]
    for run in results.runs:
        title = Text.assemble((run.what, "bold"), f"  {run.described()}")
        tables = (_speeds(run), _work(run), _particulars(run))
        parts += ["", title, *(part for t in tables for part in (t, ""))][:-1]
        parts += _lines(f"{r.name}: {r.note}" for r in run.models if r.note)
        parts += _lines(_operations(r) for r in run.models if r.operations)
        rounds = len(run.rows[0].seconds)
        if rounds != run.setting.get("rounds", rounds):
            asked = run.setting["rounds"]
            parts += _lines([f"{rounds} of {asked} rounds were run"])
        parts += _lines(_beyond_peak(run) + disagreements(run))
        parts += _lines(run.notes)
    return Group(*parts, "", *_lines(LEGEND))


def _lines(texts: Iterable[str]) -> list[RenderableType]:
    return [Text(f"- {text}") for text in texts]


def _speeds(run: Run) -> Table:
    """Times with their spread, and ratios."""
    rows, ours = run.rows, run.row(run.reference)
    return _table(
        {
            "": [row.name for row in rows],
            "median": [seconds(row.median) for row in rows],
            "quartiles": [_spread(row) for row in rows],
            "least": [seconds(min(row.seconds)) for row in rows],
            "95th": [seconds(row.percentile_95) for row in rows],
            f"x {run.reference}": [
                f"{row.ratio(ours):.2f}" if ours and not row.limit else ""
                for row in rows
            ],
        },
        rows,
    )


def _work(run: Run) -> Table:
    """Operations, bytes, and how near the row is to the limit."""
    rows = run.rows
    return _table(
        {
            "": [row.name for row in rows],
            "operations": [_amount(row.flops, "FLOP") for row in rows],
            "bytes": [_amount(row.least_bytes, "B") for row in rows],
            "of peak": [_share(run, row) for row in rows],
            "tokens/s": [
                f"{row.tokens_per_second:,.0f}" if row.tokens else ""
                for row in rows
            ],
        },
        rows,
    )


def _particulars(run: Run) -> Table:
    """Each row's answer, memory, and time of the first call."""
    rows = run.models
    return _table(
        {
            "": [row.name for row in rows],
            "output": [row.output for row in rows],
            "parameters": [
                f"{row.parameters:,}" if row.parameters else "" for row in rows
            ],
            "peak memory": [
                f"{_short(row.peak_bytes / 1e6)} MB" if row.peak_bytes else ""
                for row in rows
            ],
            "first run": [
                seconds(row.first_seconds) if row.first_seconds else ""
                for row in rows
            ],
        }
    )


def _table(
    columns: dict[str, list[str]], measured: Sequence[Row] = ()
) -> Table:
    """Return a table of the columns that are not empty, limits dimmed."""
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, header_style="bold cyan", padding=(0, 2, 0, 0))
    for number, name in enumerate(kept):
        table.add_column(
            Text(name), justify="right" if number else "left", no_wrap=True
        )
    for cells in zip(*kept.values(), strict=True):
        table.add_row(*map(Text, cells))
    for row, shown in zip(measured, table.rows, strict=False):
        shown.style = "dim" if row.limit else None
    return table


def _operations(row: Row) -> str:
    parts = ", ".join(
        f"{name.removeprefix('aten::')} {part:.0%}"
        for name, part in row.operations.items()
    )
    return f"{row.name}: {parts}"


def disagreements(run: Run) -> list[str]:
    """Name both ratios to the reference where they differ by 5 %.

    The ratio within rounds and the ratio of the medians differ where the
    machine's speed changed from round to round.
    """
    ours, found = run.row(run.reference), []
    for row in run.models:
        if ours is None:
            break
        within, overall = row.ratio(ours), row.median / ours.median
        if abs(within / overall - 1) > 0.05:
            found.append(f"{row.name} {within:.2f} and {overall:.2f}")
    if not found:
        return []
    return [
        f"x {run.reference} within rounds, and by the medians: "
        f"{', '.join(found)}; the machine's speed changed between rounds: "
        "measure again, with more --rounds"
    ]


def part_of_peak(run: Run, row: Row) -> float | None:
    """Return what part of the machine's best speed a row reaches.

    The least time is the longer of two: for the row's operations at the best
    speed of the large product, and for its bytes at that of the copies and
    sums. Only a copy or sum of no more bytes than the row's counts, as fewer
    bytes may come from a cache nearer to the processor, and of those the
    largest. None where nothing was counted.

    Source: Williams et al. 2009 (Roofline).
    """
    machine = [limit for limit in run.rows if limit.limit]
    moved = row.least_bytes or 0
    fit = [r for r in machine if 0 < (r.least_bytes or 0) <= moved]
    most = max((r.least_bytes or 0 for r in fit), default=0)
    products = [(r.flops or 0) / min(r.seconds) for r in machine if r.flops]
    moves = [
        (r.least_bytes or 0) / min(r.seconds)
        for r in fit
        if 4 * (r.least_bytes or 0) >= most  # a copy moves each byte twice
    ]
    least = [
        amount / max(speeds)
        for amount, speeds in ((row.flops, products), (moved, moves))
        if amount and speeds
    ]
    return max(least) / row.median if least else None


def _share(run: Run, row: Row) -> str:
    """The part of the peak; blank where it is none, as it is above 1."""
    part = None if row.limit else part_of_peak(run, row)
    return f"{part:.0%}" if part and part <= 1 else ""


def _beyond_peak(run: Run) -> list[str]:
    """Name the rows that were quicker than the limits allow."""
    found = [r.name for r in run.models if (part_of_peak(run, r) or 0) > 1]
    return [
        f"{name} was quicker than the limits that were measured allow: no "
        "share of the peak is given"
        for name in found
    ]


def show_changes(
    changes: Sequence[Change], tolerance: float, notes: Sequence[str] = ()
) -> Group:
    """Return new times over old ones, run by run, notes, and the verdict."""
    parts: list[RenderableType] = []
    for run in dict.fromkeys(change.run for change in changes):
        rows = [change for change in changes if change.run == run]
        table = _table(
            {
                "": [c.row.name for c in rows],
                "new / old": [f"{c.ratio:.3f}" for c in rows],
                "give or take": [f"{c.error:.3f}" for c in rows],
                "verdict": [
                    ("the machine itself: " if c.row.limit else "")
                    + c.verdict(tolerance)
                    for c in rows
                ],
            }
        )
        parts += ["", Text(run), table]
    words = [c.verdict(tolerance) for c in changes if not c.row.limit]
    slower, level = words.count("slower"), words.count("level")
    unknown = sum(word.startswith("too noisy") for word in words)
    verdict = (
        f"{slower} of {len(words)} slower, by more than {tolerance:.0%}; "
        f"{level} level, {words.count('faster')} faster, {unknown} too noisy "
        "to say"
    )
    return Group(*parts, *_lines(notes), verdict)


def seconds(value: float) -> str:
    """Return seconds as people say them."""
    unit, size = select_unit(value)
    return f"{_short(value / size)} {unit}"


def _short(number: float) -> str:
    """Three digits or more."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _amount(count: int | None, unit: str) -> str:
    """A number with a prefix: "22.9 GFLOP"."""
    if not count:
        return ""
    power = min((len(str(count)) - 1) // 3, 5)
    return f"{_short(count / 1000**power)} {' kMGTP'[power].strip()}{unit}"


def _spread(row: Row) -> str:
    """The quartiles, in the median's unit."""
    first, median, third = row.quartiles
    _, size = select_unit(median)
    return f"{_short(first / size)}-{_short(third / size)}"
