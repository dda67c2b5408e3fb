"""What was measured, as it is kept in files, read again and compared."""

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from shared.files import write_json

from .timing import Timing

VERSION = 2
LIBRARIES = ("torch", "transformers", "x-transformers")
# two machines are one where these agree; libraries may have been renewed
IDENTITY = ("processor", "cores", "accelerator", "system")

# what a row may leave out, and is else a number from 0
COUNTS = (
    *("flops", "moved", "tokens", "parameters"),
    *("first_seconds", "peak_bytes"),
)

Value = str | int | float | bool


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    Attributes:
        name: what ran.
        seconds: one number a round.
        limit: whether it is no model, but something the machine can do.
        flops: floating-point operations of one run, None if not counted.
        moved: bytes that one run moves to and from memory at least.
        tokens: number of tokens of one run.
        gives: "logits" or "log-probs".
        parameters: number of parameters.
        first_seconds: time of the first run: warming up, compiling.
        peak_bytes: most memory of one run, without weights.
        note: what a reader has to know.
        operations: parts of the time by operation, where it was profiled.
    """

    name: str
    seconds: list[float]
    limit: bool = False
    flops: int | None = None
    moved: int | None = None
    tokens: int | None = None
    gives: str = ""
    parameters: int | None = None
    first_seconds: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    operations: dict[str, float] = field(default_factory=dict)

    @property
    def timing(self) -> Timing:
        """The seconds with their statistics."""
        return Timing(self.name, self.seconds)

    @property
    def rate(self) -> float | None:
        """Floating-point operations a second, by the median."""
        return self.flops / self.timing.median if self.flops else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, by the median."""
        return self.moved / self.timing.median if self.moved else None


@dataclass(frozen=True)
class Run:
    """Things that were measured in turn, in the same rounds.

    Attributes:
        what: which measurement: "forward", "generate", ...
        setting: what was asked for, by name.
        rows: what was measured.
        reference: name of the row that the others are compared to.
        notes: sentences for the reader.
        not_run: why there are no rows, where there are none.
    """

    what: str
    setting: dict[str, Value]
    rows: list[Row] = field(default_factory=list)
    reference: str = ""
    notes: list[str] = field(default_factory=list)
    not_run: str = ""

    def row(self, name: str) -> Row | None:
        """Return the row of that name, if there is one."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def models(self) -> list[Row]:
        """The rows that are no limits."""
        return [row for row in self.rows if not row.limit]


@dataclass(frozen=True)
class Results:
    """All that one call measured, on one machine.

    Attributes:
        machine: facts about it, by name.
        runs: what was measured.
    """

    machine: dict[str, Value]
    runs: list[Run]

    def save(self, path: Path) -> None:
        """Write a JSON file whole, or leave the old one as it is."""
        write_json(path, {"version": VERSION} | asdict(self))


def machine_facts(device: torch.device) -> dict[str, Value]:
    """Return what a number depends on: processor, versions, other work.

    "load" is the mean number of busy processes in the minute before.
    """
    facts: dict[str, Value] = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "accelerator": _accelerator(device),
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 1)
        if hasattr(os, "getloadavg")
        else 0.0,
        "python": platform.python_version(),
    }
    for library in LIBRARIES:
        try:
            facts[library] = version(library)
        except PackageNotFoundError:
            facts[library] = "none"
    return facts


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerator(device: torch.device) -> str:
    if device.type == "cpu":
        return "none"
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return str(name(device)) if name else device.type


def read_results(path: Path) -> Results:
    """Read what `save` wrote.

    Raises:
        ValueError: in one line, for a file that cannot be read, is of
            another version, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # or a number of 5000 digits
        raise ValueError(f"{path} is no JSON") from None
    found = content.get("version") if isinstance(content, dict) else None
    if found is None:
        raise ValueError(f"{path} is no benchmark: it has no 'version'")
    if found != VERSION:
        raise ValueError(
            f"{path} has version {found!r}, this reads version {VERSION}"
        )
    try:
        machine = _facts("machine", content["machine"])
        runs = [_run(run) for run in _list(content["runs"])]
    except (KeyError, TypeError, ValueError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no benchmark: {told}") from None
    return Results(machine, runs)


def _run(content: Any) -> Run:
    content = dict(_mapping(content))
    rows = [_row(row) for row in _list(content.pop("rows"))]
    run = Run(**content, rows=rows)
    for name in ("what", "reference", "not_run"):
        _require(name, getattr(run, name), str)
    for note in _list(run.notes):
        _require("a note", note, str)
    _facts("setting", run.setting)
    for name in {"batch", "time"} & {*run.setting}:
        value = run.setting[name]
        if type(value) is not int or not _positive(value):
            raise ValueError(f"{name} is {_shown(value)}")
    rounds = {len(row.seconds) for row in rows}
    if len(rounds) > 1:
        raise ValueError(f"rows have {min(rounds)} and {max(rounds)} rounds")
    return run


def _row(content: Any) -> Row:
    row = Row(**_mapping(content))
    _require("the name of a row", row.name, str)
    for name, kind in (("limit", bool), ("gives", str), ("note", str)):
        _require(f"{name} of {row.name!r}", getattr(row, name), kind)
    if not _list(row.seconds) or not all(map(_positive, row.seconds)):
        raise ValueError(
            f"the seconds of {row.name!r} are not a list of numbers above 0"
        )
    for name in COUNTS:
        value = getattr(row, name)
        if value is not None and not (_number(value) and value >= 0):
            raise ValueError(f"{name} of {row.name!r} is {_shown(value)}")
    for name, part in _mapping(row.operations).items():
        if not _number(part):
            raise ValueError(
                f"operation {name!r} of {row.name!r} is {_shown(part)}"
            )
    return row


def _require(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {_shown(value)}")


def _facts(name: str, content: Any) -> dict[str, Any]:
    """Check a mapping of plain values: they are compared and printed."""
    for key, value in _mapping(content).items():
        if not (isinstance(value, str | bool) or _number(value)):
            raise ValueError(f"{key!r} of a {name} is {_shown(value)}")
    return content


def _mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} where names are needed")
    return content


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"{type(content).__name__} where a list is needed")
    return content


def _number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _shown(value: Any) -> str:
    """Return a value in words, a very long one cut."""
    try:
        shown = repr(value)
    except ValueError:  # Python writes no number of 5000 digits
        return "a very long number"
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


@dataclass(frozen=True)
class Change:
    """How one row's time changed from an old file to now.

    Attributes:
        run: the measurement, in words.
        row: what ran.
        low: new over old, first quartile over third.
        ratio: new median over old median: above 1 is slower.
        high: new over old, third quartile over first.
    """

    run: str
    row: Row
    low: float
    ratio: float
    high: float

    def slower(self, tolerance: float) -> bool:
        """Whether a model takes longer than the tolerance allows."""
        return not self.row.limit and self.ratio > 1 + tolerance


def changes(old: Results, new: Results) -> list[Change]:
    """Compare each row with the same row of the same setting before.

    Raises:
        ValueError: for results of another machine, or of nothing that was
            measured now.
    """
    require_same_machine(old.machine, new.machine)
    found = [
        _change(run, row, same)
        for run, before in _pairs(old, new)
        for row in run.rows
        if before is not None and (same := before.row(row.name)) is not None
    ]
    if not found:
        require_counterpart(old, new.runs)
        raise ValueError("nothing to compare: no row is in both files")
    return found


def unmatched(old: Results, new: Results) -> list[str]:
    """Say what is in one of two results only, and was not compared.

    Runs that were measured before alone are passed over: another
    subcommand's are no news.
    """
    told = []
    for run, before in _pairs(old, new):
        if before is None:
            why = _nearest(old.runs, [run])
            told.append(f"not in the old file: {describe(run)} ({why})")
            continue
        names, then = ([row.name for row in r.rows] for r in (run, before))
        for where, alone in (
            ("not in the old file", [n for n in names if n not in then]),
            ("only in the old file", [n for n in then if n not in names]),
        ):
            if alone:
                told.append(f"{where}: {', '.join(alone)} of {describe(run)}")
    return told


def require_counterpart(old: Results, planned: Sequence[Run]) -> None:
    """Refuse old results that nothing planned can be compared to.

    Args:
        old: results.
        planned: runs of which a part of the setting may be known.

    Raises:
        ValueError: naming the first fact of the setting that differs from
            the old run that is nearest, and both values.
    """
    for run in planned:
        for before in old.runs:
            if run.what == before.what and not _differing(run, before):
                return
    raise ValueError(f"nothing to compare: {_nearest(old.runs, planned)}")


def _nearest(old: Iterable[Run], planned: Sequence[Run]) -> str:
    """Say what keeps the nearest pair of runs apart."""
    apart = [
        differing
        for run in planned
        for before in old
        if run.what == before.what and (differing := _differing(run, before))
    ]
    if not apart:
        names = dict.fromkeys(run.what for run in planned)
        return f"the old file has no run of {' or '.join(names)}"
    name, was, here = min(apart, key=len)[0]
    return (
        "the old file has no run of this setting: "
        f"{name} was {was}, here {here}"
    )


def _differing(run: Run, before: Run) -> list[tuple[str, Any, Any]]:
    """The facts of a run's setting that were not so before."""
    return [
        (name, before.setting.get(name, "absent"), value)
        for name, value in run.setting.items()
        if name != "rounds" and before.setting.get(name) != value
    ]


def require_same_machine(
    old: Mapping[str, Value], new: Mapping[str, Value]
) -> None:
    """Refuse to compare times of two machines.

    Raises:
        ValueError: naming the fact that differs, and both values.
    """
    for fact in IDENTITY:
        if old.get(fact) != new.get(fact):
            raise ValueError(
                f"the old file is of another machine: {fact} was "
                f"{old.get(fact)!r}, here it is {new.get(fact)!r}"
            )


def renewed(old: Mapping[str, Value], new: Mapping[str, Value]) -> list[str]:
    """Say which versions are not those of the old results."""
    return [
        f"{name} was {old.get(name)}, is {new.get(name)}"
        for name in ("python", *LIBRARIES)
        if old.get(name) != new.get(name)
    ]


def _pairs(old: Results, new: Results) -> Iterator[tuple[Run, Run | None]]:
    """Each new run, and the old run of the same setting if there is one."""
    before = dict(_keyed(old.runs))
    for key, run in _keyed(new.runs):
        yield run, before.get(key)


def _keyed(runs: Sequence[Run]) -> Iterator[tuple[Any, Run]]:
    """Each run with what identifies it.

    A setting may come again, as that of S3 among the goals, first with
    peers, then as a point of the growth: the first then is the first.
    """
    seen: Counter[Any] = Counter()
    for run in runs:
        facts = {k: v for k, v in run.setting.items() if k != "rounds"}
        key = run.what, *sorted(facts.items())
        seen[key] += 1
        yield (key, seen[key]), run


def _change(run: Run, row: Row, old: Row) -> Change:
    first, median, third = row.timing.quartiles
    old_first, old_median, old_third = old.timing.quartiles
    return Change(
        describe(run),
        row,
        first / old_third,
        median / old_median,
        third / old_first,
    )


def describe(run: Run) -> str:
    """Return a run's name and setting in a few words."""
    parts = [run.what, *(f"{k} {v}" for k, v in run.setting.items())]
    return ", ".join(parts)
