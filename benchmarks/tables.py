"""Show results as tables in a terminal.

`_cells` computes the columns from a Row of shared/benchmark_results.py, which
measure.py fills. docs/explanation/bench.md explains the columns.

All strings are passed as Text, because names and notes may have brackets,
which rich would read as markup.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch.utils.benchmark import select_unit

from gpt_duet.benchmark_results import PERCENTS, Results, Row, Run
from gpt_duet.timing import percentile

from .compare import Change

# sentences on columns, by the first of the columns that each explains
LEGEND = {
    "x ": "x NAME: the time as a multiple of NAME's time in the same round, "
    "the median over the rounds; 1.20 takes a fifth longer",
    "least": "least, 95th: the least time of a round, and the 95th percentile",
    "operations": "operations: floating-point operations of a run, counted; "
    "bytes: the least bytes that it must move: weights read, scores written",
    "of peak": "of peak: the least time in which this machine could do the "
    "row's work (the longer of two: its operations at the best speed of the "
    "matmul, its bytes at that of the copy or read), in percent of the row's "
    "time",
    "peak memory": "peak memory: in addition to the weights",
    "first run": "first run: includes warming up and compiling",
    "parameters": "parameters differ if a head is not tied to its embedding, "
    "or if a position table is not trained",
}


def show_results(results: Results) -> Group:
    """Return the facts of the machine, the tables of runs, and a legend."""
    facts = ", ".join(f"{k} {v}" for k, v in results.machine.items())
    parts: list[RenderableType] = [Text(facts)]
    columns: list[str] = []
    for run in results.runs:
        title = Text.assemble((run.what, "bold"), f"  {run.described()}")
        tables = zip(*(_cells(run, row) for row in run.rows), strict=True)
        made = (_table(cells, run.rows) for cells in tables)
        shown = [table for table in made if len(table.columns) > 1]
        columns += [str(c.header) for table in shown for c in table.columns]
        parts += ["", title, *(part for t in shown for part in (t, ""))][:-1]
        parts += _lines(f"{r.name}: {r.note}" for r in run.models if r.note)
        rounds = len(run.rows[0].seconds)
        if rounds != run.setting.get("rounds", rounds):
            asked = run.setting["rounds"]
            parts += _lines([f"ran {rounds} of {asked} rounds"])
        parts += _lines(_beyond_peak(run) + disagreements(run))
        parts += _lines(run.notes)
    said = [
        words
        for start, words in LEGEND.items()
        if any(name.startswith(start) for name in columns)
    ]
    return Group(*parts, "", *_lines(said))


def _lines(texts: Iterable[str]) -> list[RenderableType]:
    return [Text(f"- {text}") for text in texts]


def _cells(run: Run, row: Row) -> list[dict[str, str]]:
    """Return a row's cells in each table: times, work, particulars."""
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
    """Return a table without empty columns; rows of the machine are dim."""
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
    """Return a note if a ratio is over 5 % from the ratio of the medians."""
    ours, found = run.row(run.reference), []
    for row in run.models if ours else ():
        within, overall = row.ratio(ours), row.median / ours.median
        if abs(within / overall - 1) > 0.05:
            found.append(f"{row.name} {within:.2f} and {overall:.2f}")
    return [
        f"x {run.reference} within rounds, and from the medians: "
        f"{', '.join(found)}; the machine's speed changed between rounds: "
        "measure again with more --rounds"
    ][: len(found)]


def _beyond_peak(run: Run) -> list[str]:
    """Return a note for each row that was faster than the limits allow."""
    return [
        f"{row.name} was faster than the measured limits allow: no share of "
        "the peak is shown"
        for row in run.models
        if (run.part_of_peak(row) or 0) > 1
    ]


def show_changes(
    changes: Sequence[Change], tolerance: float, notes: Sequence[str] = ()
) -> Group:
    """Return each run's changes, the notes, and the verdict."""
    parts: list[RenderableType] = []
    for run in dict.fromkeys(change.run for change in changes):
        rows = [change for change in changes if change.run == run]
        cells = [_change_cells(change, tolerance) for change in rows]
        table = _table(cells, [change.row for change in rows])
        parts += ["", Text(run), table]
        parts += _lines(_machine_changes(rows, tolerance))
    paces = [c.pace(tolerance) for c in changes if not c.machine]
    count = Counter[str](paces)
    verdict = (
        f"{count['slower']} of {len(paces)} slower, by more than "
        f"{tolerance:.0%}; {count['level']} level, {count['faster']} faster, "
        f"{count['unknown']} too noisy to say"
    )
    return Group(*parts, *_lines(notes), Text(verdict))


def _change_cells(change: Change, tolerance: float) -> dict[str, str]:
    """Return the cells of a change, with the ratio that its verdict is on."""
    judged, plain = change.judged(tolerance), change.plain
    cells = {"": change.row.name, "new / old": f"{plain.value:.3f}"}
    if judged is change.within and judged is not None:
        assert change.unchanged is not None
        cells[f"as x {change.unchanged.name}"] = f"{judged.value:.3f}"
    cells["give or take"] = f"{(judged or plain).error:.3f}"
    machine = "the machine itself: " if change.machine else ""
    return cells | {"verdict": machine + change.verdict(tolerance)}


def _machine_changes(
    changes: Iterable[Change], tolerance: float
) -> Iterator[str]:
    """Yield a sentence if an unchanged row shows that the speed changed."""
    found = {c.unchanged: c.within is not None for c in changes}
    for row, comparable in found.items():
        if row is not None and row.machine_changed(tolerance):
            how = (
                f"verdicts are on the ratio to {row.name} within each run"
                if comparable
                else "there is no verdict on the models"
            )
            yield (
                f"{row.name}, unchanged, is {row.ratio:.2f}: the machine "
                f"changed; {how}"
            )


def seconds(value: float | None) -> str:
    """Return seconds with a unit; "" for None."""
    if value is None:
        return ""
    unit, size = select_unit(value)
    return f"{_short(value / size)} {unit}"


def _short(number: float) -> str:
    """Return a number with at least three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _amount(count: int | None, unit: str) -> str:
    """Return a count with a unit prefix: "22.9 GFLOP"."""
    if not count:
        return ""
    power = min((len(str(count)) - 1) // 3, 5)
    return f"{_short(count / 1000**power)} {' kMGTP'[power].strip()}{unit}"
