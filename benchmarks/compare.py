"""New results against old ones of the same machine and setting."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpt_duet.comparison.benchmark_results import Results, Row, Run, Value

from .machine import LIBRARIES

# two machines are one where these agree; libraries may have been renewed
IDENTITY = ("processor", "cores", "accelerator", "system")

Facts = dict[str, Value]


@dataclass(frozen=True)
class Change:
    """How one row's time changed from an old file to now."""

    run: str  # the measurement, in words
    row: Row  # what ran
    low: float  # new over old, first quartile over third
    ratio: float  # new median over old median: above 1 is slower
    high: float  # new over old, third quartile over first

    def slower(self, tolerance: float) -> bool:
        """Whether it takes longer than the tolerance allows.

        The median says so, and the quartiles do not overlap: one busy
        minute of the machine moves a median of few rounds, too.
        """
        return self.ratio > 1 + tolerance and self.low > 1


def compare_results(
    old: Results, new: Results
) -> tuple[list[Change], list[str]]:
    """Compare each row with the same row of the same setting before.

    The notes are what else a reader has to know: what was not compared, and
    versions that are not the old ones.
    """
    before = {_key(run.what, run.setting): run for run in old.runs}
    changes, notes = [], []
    for run in new.runs:
        name = f"{run.what}, {run.described()}"
        then = before.get(_key(run.what, run.setting))
        if then is None:
            notes.append(f"not in the old file: {name}")
            continue
        rows, were = ({r.name: r for r in x.rows} for x in (run, then))
        for row in rows.values():
            if row.name in were:
                changes.append(_change(name, row, were[row.name]))
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


def require_comparable(
    old: Results, machine: Facts, what: str, settings: Sequence[Facts]
) -> None:
    """Refuse old results of another machine, or without an equal setting."""
    for fact in IDENTITY:
        was, now = old.machine.get(fact), machine.get(fact)
        if was != now:
            raise ValueError(
                f"the old file is of another machine: {fact} was {was!r}, "
                f"here it is {now!r}"
            )
    now = [Run(what, setting, [Row("", [1.0])]) for setting in settings]
    if not any(_fits(a, b) for a in old.runs for b in now):
        was, here = (
            "; ".join(f"{run.what}, {run.described()}" for run in runs)
            for runs in (old.runs, now)
        )
        raise ValueError(
            "nothing to compare: no equal setting is in the old file, which "
            f"has: {was}; this call has: {here}"
        )


def _fits(old: Run, planned: Run) -> bool:
    """Whether a plan, which may leave threads open, may have an old key."""
    if "threads" not in planned.setting and "threads" in old.setting:
        setting = planned.setting | {"threads": old.setting["threads"]}
        planned = Run(planned.what, setting, planned.rows)
    return _key(old.what, old.setting) == _key(planned.what, planned.setting)


def _key(what: str, setting: Facts) -> tuple:
    """Return the settings that two runs must share to be compared."""
    return what, *sorted((k, v) for k, v in setting.items() if k != "rounds")


def _change(run: str, row: Row, old: Row) -> Change:
    new, was = row.quartiles, old.quartiles
    return Change(run, row, new[0] / was[2], new[1] / was[1], new[2] / was[0])
