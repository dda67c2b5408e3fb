"""Results as text in a terminal.

Names and notes may hold brackets, which rich would read as its markup:
everything is handed over as Text, which it prints as it stands.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch.utils.benchmark import select_unit

from gpt_duet.benchmark_results import PERCENTS, Results, Row, Run
from gpt_duet.timing import percentile

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
        tables = zip(*(_cells(run, row) for row in run.rows), strict=True)
        made = (_table(cells, run.rows) for cells in tables)
        shown = [table for table in made if len(table.columns) > 1]
        parts += ["", title, *(part for t in shown for part in (t, ""))][:-1]
        parts += _lines(f"{r.name}: {r.note}" for r in run.models if r.note)
        rounds = len(run.rows[0].seconds)
        if rounds != run.setting.get("rounds", rounds):
            asked = run.setting["rounds"]
            parts += _lines([f"{rounds} of {asked} rounds were run"])
        parts += _lines(_beyond_peak(run) + disagreements(run))
        parts += _lines(run.notes)
    return Group(*parts, "", *_lines(LEGEND))


def _lines(texts: Iterable[str]) -> list[RenderableType]:
    return [Text(f"- {text}") for text in texts]


def _cells(run: Run, row: Row) -> list[dict[str, str]]:
    """Return a row's cells in each table: its times, work, particulars."""
    ours, rate = run.row(run.reference), row.tokens_per_second or 0
    batch, ratio, part = int(run.setting.get("batch", 1)), "", None
    if not row.limit:
        ratio = f"{row.ratio(ours):.2f}" if ours else ""
        part = run.part_of_peak(row)
    first, median, third = row.quartiles
    _, unit = select_unit(median)
    times = {
        "median": seconds(median),
        "quartiles": f"{_short(first / unit)}-{_short(third / unit)}",
        "least": seconds(min(row.seconds)),
        "95th": seconds(percentile(row.seconds, 95)),
        f"x {run.reference}": ratio,
    }
    work = {
        "operations": _amount(row.flops, "FLOP"),
        "bytes": _amount(row.least_bytes, "B"),
        "of peak": f"{part:.0%}" if part and part <= 1 else "",
        "tokens/s": f"{rate:,.0f}" if rate else "",
    }
    if rate and row.first_token and batch > 1:
        work["of one text"] = f"{rate / batch:,.1f}"
    peak, count = row.peak_bytes, row.parameters
    particulars = {
        "output": row.output,
        "parameters": f"{count:,}" if count else "",
        "peak memory": f"{_short(peak / 1e6)} MB" if peak else "",
        "cache": _amount(row.cache_bytes, "B"),
        "first run": seconds(row.first_seconds),
        "first token": seconds(row.first_token),
    }
    for percent, wait in zip(PERCENTS, row.between_tokens, strict=False):
        particulars[f"then p{percent}"] = seconds(wait)
    found = [times, work, {} if row.limit else particulars]
    return [{"": row.name} | cells if cells else {} for cells in found]


def _table(cells: Iterable[dict[str, str]], rows: Sequence[Row]) -> Table:
    """Return a table of the columns that are not empty, limits dimmed."""
    found = [(r, c) for r, c in zip(rows, cells, strict=True) if c]
    every = dict.fromkeys(name for _, cell in found for name in cell)
    names = [n for n in every if any(cell.get(n) for _, cell in found)]
    table = Table(box=None, header_style="bold cyan", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(
            Text(name), justify="right" if name else "left", no_wrap=True
        )
    for row, cell in found:
        shown = [Text(cell.get(name, "")) for name in names]
        table.add_row(*shown, style="dim" if row.limit else None)
    return table


def disagreements(run: Run) -> list[str]:
    """Name both ratios to the reference where they differ by 5 %."""
    ours, found = run.row(run.reference), []
    for row in run.models if ours else ():
        within, overall = row.ratio(ours), row.median / ours.median
        if abs(within / overall - 1) > 0.05:
            found.append(f"{row.name} {within:.2f} and {overall:.2f}")
    return [
        f"x {run.reference} within rounds, and by the medians: "
        f"{', '.join(found)}; the machine's speed changed between rounds: "
        "measure again, with more --rounds"
    ][: len(found)]


def _beyond_peak(run: Run) -> list[str]:
    """Name the rows that were quicker than the limits allow."""
    return [
        f"{row.name} was quicker than the limits that were measured allow: "
        "no share of the peak is given"
        for row in run.models
        if (run.part_of_peak(row) or 0) > 1
    ]


def show_changes(
    changes: Sequence[Change], tolerance: float, notes: Sequence[str] = ()
) -> Group:
    """Return new times over old ones, run by run, notes, and the verdict."""
    parts: list[RenderableType] = []
    for run in dict.fromkeys(change.run for change in changes):
        rows = [change for change in changes if change.run == run]
        cells = [
            {
                "": change.row.name,
                "new / old": f"{change.ratio:.3f}",
                "give or take": f"{change.error:.3f}",
                "verdict": ("the machine itself: " if change.row.limit else "")
                + change.verdict(tolerance),
            }
            for change in rows
        ]
        table = _table(cells, [change.row for change in rows])
        parts += ["", Text(run), table]
    paces = [c.pace(tolerance) for c in changes if not c.row.limit]
    count = Counter[str](paces)
    verdict = (
        f"{count['slower']} of {len(paces)} slower, by more than "
        f"{tolerance:.0%}; {count['level']} level, {count['faster']} faster, "
        f"{count['unknown']} too noisy to say"
    )
    return Group(*parts, *_lines(notes), Text(verdict))


def seconds(value: float | None) -> str:
    """Return seconds as people say them; of None nothing."""
    if value is None:
        return ""
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
