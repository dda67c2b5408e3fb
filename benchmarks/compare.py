"""Compare new results with old ones of the same machine and setting."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gpt_duet.benchmark_results import Results, Row, Run, Value
from gpt_duet.timing import median_error, ratios

from . import PEERS, STYLES
from .machine import LIBRARIES

MOST_ROUNDS = 1000  # most rounds that a verdict may recommend
# facts that must be equal on one machine; versions of libraries may differ
IDENTITY = ("processor", "cores", "accelerator", "system")

# settings that a plan may leave open until the models are built
OPEN = {"threads", "vocabulary", "time", "prompt"}
OPEN |= {"shape", "layers", "heads", "width"}
Facts = dict[str, Value]
Pace = Literal["slower", "faster", "level", "unknown"]


@dataclass(frozen=True)
class Ratio:
    """A new time divided by an old time; more than 1 is slower."""

    value: float
    error: float  # error of the ratio, not exceeded in 19 of 20 cases

    def pace(self, tolerance: float) -> Pace:
        """Return the verdict; "unknown" if the error leaves a doubt."""
        least, most = 1 / (1 + tolerance), 1 + tolerance
        low, high = self.value - self.error, self.value + self.error
        if low > most:
            return "slower"
        if high < least:
            return "faster"
        return "level" if low >= least and high <= most else "unknown"


@dataclass(frozen=True)
class Unchanged:
    """A row whose model has not changed, so that it shows the machine's speed.

    If there are several such rows, it is the one with the median ratio.
    """

    name: str
    ratio: float  # the unchanged row's new median divided by its old median

    def machine_changed(self, tolerance: float) -> bool:
        """Return whether the machine's speed differs from before."""
        return not 1 / (1 + tolerance) <= self.ratio <= 1 + tolerance


@dataclass(frozen=True)
class Change:
    """The change of one row's time from an old file to now.

    If the machine's speed has changed, the verdict is not on the time, but on
    the row's ratio to an unchanged row in the same rounds.
    """

    run: str  # the measurement, in words
    row: Row  # the model and its sizes
    plain: Ratio  # the new median divided by the old one
    unchanged: Unchanged | None = None  # None if no other row is unchanged
    # the row's new ratio to the unchanged row, divided by its old one
    within: Ratio | None = None
    machine: bool = False  # whether this row shows the machine's speed

    def judged(self, tolerance: float) -> Ratio | None:
        """Return the ratio that the verdict is about; None if unknown."""
        row = self.unchanged
        if self.machine or row is None or not row.machine_changed(tolerance):
            return self.plain
        return self.within

    def pace(self, tolerance: float) -> Pace:
        """Return the verdict on this row."""
        ratio = self.judged(tolerance)
        return "unknown" if ratio is None else ratio.pace(tolerance)

    def verdict(self, tolerance: float) -> str:
        """Return the verdict in words, or how many rounds a verdict needs."""
        ratio = self.judged(tolerance)
        if ratio is None:
            return "the machine changed: measure both again"
        pace = ratio.pace(tolerance)
        if pace != "unknown":
            return pace
        least, most = 1 / (1 + tolerance), 1 + tolerance
        rounds = len(self.row.seconds)
        margin = min(abs(ratio.value - least), abs(ratio.value - most))
        if math.isinf(ratio.error):
            return "too noisy to say: run at least 5 rounds"
        # the error shrinks with the root of the number of rounds
        needed = (rounds - 1) * (ratio.error / max(margin, 1e-9)) ** 2 + 1
        if needed > MOST_ROUNDS:
            return "too noisy to say; more rounds will not help"
        return f"too noisy to say: run about {math.ceil(needed)} rounds"


def compare_results(
    old: Results, new: Results
) -> tuple[list[Change], list[str]]:
    """Compare each row with the old row that has the same setting.

    Returns:
        The changes; and notes on rows that were not compared, and on changed
        versions.
    """
    before = {_key(run.what, run.setting): run for run in old.runs}
    changes: list[Change] = []
    notes: list[str] = []
    for run in new.runs:
        name = f"{run.what}, {run.described()}"
        then = before.get(_key(run.what, run.setting))
        if then is None:
            notes.append(f"not in the old file: {name}")
            continue
        rows, were = ({r.name: r for r in x.rows} for x in (run, then))
        changes += _changes(name, rows, were)
        for where, alone in (
            ("not in the old file", rows.keys() - were.keys()),
            ("only in the old file", were.keys() - rows.keys()),
        ):
            if alone:
                notes.append(f"{where}: {', '.join(sorted(alone))} of {name}")
    for name in ("python", *LIBRARIES):
        was, now = old.machine.get(name), new.machine.get(name)
        if was != now:
            notes.append(f"{name} was {was}, is {now}")
    return changes, notes


def _changes(
    run: str, now: Mapping[str, Row], was: Mapping[str, Row]
) -> Iterator[Change]:
    """Yield the change of each row that both runs have."""
    both = {name: (now[name], was[name]) for name in now if name in was}
    plain = {name: _ratio_of_medians(*pair) for name, pair in both.items()}
    same = _unchanged(row for row, _ in both.values())
    # the median must be the ratio of one row, so of two rows in the middle,
    # take the lower
    ordered = sorted(same, key=lambda name: plain[name].value)
    middle = ordered[(len(ordered) - 1) // 2] if ordered else None
    for name, (row, old) in both.items():
        machine = row.limit or name in same
        if machine or middle is None:
            yield Change(run, row, plain[name], machine=machine)
            continue
        control, within = both[middle], None
        if not control[0].limit:
            within = _ratio_within(row, old, *control)
        found = Unchanged(middle, plain[middle].value)
        yield Change(run, row, plain[name], found, within)


def _unchanged(rows: Iterable[Row]) -> set[str]:
    """Return the names of rows whose model has not changed.

    If some rows are a user's own models, the unchanged rows are the styles and
    their peers. Otherwise they are the peers or, without peers, the limits.
    """
    rows = list(rows)
    models = [row.name for row in rows if not row.limit]
    ours = [name for name in models if _built_as(name) in (*STYLES, *PEERS)]
    peers = {name for name in ours if _built_as(name) in PEERS}
    found = {*ours} if len(ours) < len(models) else peers
    return found or {row.name for row in rows if row.limit}


def _built_as(name: str) -> str:
    """Return a row's model: "annotated" for "annotated-own compiled"."""
    return name.partition(" ")[0].removesuffix("-own")


def _ratio_of_medians(now: Row, was: Row) -> Ratio:
    value = now.median / was.median
    error = math.hypot(median_error(now.seconds), median_error(was.seconds))
    return Ratio(value, value * error)


def _ratio_within(now: Row, was: Row, control: Row, before: Row) -> Ratio:
    """Return a row's new ratio to a control row, divided by its old one."""
    new, old = (
        ratios(row.seconds, other.seconds)
        for row, other in ((now, control), (was, before))
    )
    value = median(new) / median(old)
    return Ratio(value, value * math.hypot(*map(median_error, (new, old))))


def require_comparable(
    old: Results, machine: Facts, what: str, settings: Sequence[Facts]
) -> None:
    """Raise ValueError if old results have another machine or setting."""
    for fact in IDENTITY:
        was, now = old.machine.get(fact), machine.get(fact)
        if was != now:
            words = f"{fact} was {was!r}, here it is {now!r}"
            raise ValueError(f"the old file is from another machine: {words}")
    planned = [Run(what, setting, [Row("", [1.0])]) for setting in settings]
    if not any(_fits(a, b) for a in old.runs for b in planned):
        was, here = (
            "; ".join(f"{run.what}, {run.described()}" for run in runs)
            for runs in (old.runs, planned)
        )
        raise ValueError(
            "nothing to compare: no equal setting is in the old file, which "
            f"has: {was}; this call has: {here}"
        )


def _fits(old: Run, planned: Run) -> bool:
    """Return whether an old run fits a plan with some open settings."""
    open_ = OPEN - planned.setting.keys()
    setting = {k: v for k, v in old.setting.items() if k in open_}
    return _key(old.what, old.setting) == _key(
        planned.what, planned.setting | setting
    )


def _key(what: str, setting: Facts) -> tuple:
    """Return the settings that must be equal if two runs are compared."""
    return what, *sorted((k, v) for k, v in setting.items() if k != "rounds")
