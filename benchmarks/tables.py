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
    "operations: floating-point, counted; bytes: that a run must move to and "
    "from memory at least",
    "of peak: the least time in which this machine could do the row's work "
    "(its operations at the speed of the matmul, or its bytes at that of the "
    "copy or read, whichever takes longer), in percent of the row's time",
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
        parts += _lines(disagreements(run))
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
    parts = [part_of_peak(run, row) for row in rows]
    return _table(
        {
            "": [row.name for row in rows],
            "operations": [_amount(row.flops, "FLOP") for row in rows],
            "bytes": [_amount(row.least_bytes, "B") for row in rows],
            "of peak": [
                f"{part:.0%}" if part and not row.limit else ""
                for row, part in zip(rows, parts, strict=True)
            ],
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

    The least time is the longer of two: for the row's operations at the
    speed of the large product, and for its least bytes at that of the large
    copy or sum, all measured in the same rounds. Above 1 is noise, or a
    dtype that the machine has no large products for, such as float16 on a
    CPU. None where nothing was counted.

    Source: Williams et al. 2009 (Roofline).
    """
    least = []
    for work in ("flops", "least_bytes"):
        speeds = [
            getattr(limit, work) / limit.median
            for limit in run.rows
            if limit.limit and getattr(limit, work)
        ]
        if speeds and getattr(row, work):
            least.append(getattr(row, work) / max(speeds))
    return max(least) / row.median if least else None


def show_changes(
    changes: Sequence[Change], tolerance: float, notes: Sequence[str] = ()
) -> Group:
    """Return new times over old ones, notes for the reader, the verdict."""
    kinds = {True: "the machine itself", False: "slower"}
    words = [
        kinds[c.row.limit] if c.slower(tolerance) else "" for c in changes
    ]
    table = _table(
        {
            "": [f"{c.run.split(',')[0]}: {c.row.name}" for c in changes],
            "new / old": [f"{c.ratio:.3f}" for c in changes],
            "quartiles": [f"{c.low:.3f} to {c.high:.3f}" for c in changes],
            "slower": words,
        }
    )
    models = sum(not change.row.limit for change in changes)
    verdict = (
        f"{words.count('slower')} of {models} slower: by more than "
        f"{tolerance:.0%}, with quartiles that do not overlap"
    )
    return Group("", table, *_lines(notes), verdict)


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
