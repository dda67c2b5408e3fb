"""The results of the checks, as a table and as JSON."""

import html
import json
import re
import textwrap
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..notebooks import as_html

# Of the JSON: fields are added under one number; a field that goes or changes
# its meaning makes the next one.
ORIGIN: dict[str, Any] = {"schema": 1, "version": "unknown"}
with suppress(PackageNotFoundError):  # a checkout that is not installed
    ORIGIN["version"] = version("gpt-duet")
Cells = tuple[str, str, str]  # name, status and seconds
STATUSES = ("passed", "failed", "skipped", "expected", "error")
BAD = ("failed", "error")

# of a notebook's table; others are gray
COLOURS = {"passed": "green", "failed": "crimson", "error": "crimson"}
WIDTH = 110  # columns of the printed table
GAP = "  "  # between its columns

CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")  # but for \t and \n


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    status: str  # of STATUSES; "error": the check broke, not the model
    message: str  # what was tried, what failed, or why it was skipped
    seconds: float
    forwards: int = 0  # calls of the model whose scores were read
    backwards: int = 0  # passes back from these scores
    not_tried: str = ""  # what a check had no time to try, and why
    proof: dict[str, Any] | None = None  # as Proof.to_dict writes it
    # position, token, length, size, file, line; null where not known
    leak: dict[str, Any] | None = None
    # lines that a failure is about, each a file and a line; likeliest first
    places: list[dict[str, Any]] = field(default_factory=list)


@dataclass(repr=False)
class Report:
    """The outcomes for one model; printed, a table."""

    model: str
    vocab_size: int
    block_size: int  # longest sequence tried
    names: list[str] = field(default_factory=list)  # of checks, in order
    results: list[CheckResult] = field(default_factory=list)
    # how the model was read, and what it did next to answering
    notes: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)  # maps, by check
    plan: str = ""  # how much time there is, where it is short
    interim: str = ""  # how far a check is before its end
    left_out: list[str] = field(default_factory=list)  # checks not run
    # arguments of the call that no check gives
    never_given: list[str] = field(default_factory=list)
    interrupted: bool = False
    kept: str = ""  # when the run was, if it is an earlier one's

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed, expected failures left out."""
        return [r.name for r in self.results if r.status == "failed"]

    @property
    def ok(self) -> bool:
        """Whether all was tried and nothing failed."""
        return not (self.failed or self.errors or self.interrupted)

    @property
    def under_way(self) -> str:
        """How far the run is, in a line; "" at its end."""
        done = len(self.results)
        for name in self.names[done:]:
            count = f"({done + 1} of {len(self.names)})"
            return f"{self.interim or name} {count}"
        return ""

    @property
    def errors(self) -> list[str]:
        """Names of the checks that broke themselves: no fault of the model."""
        return [r.name for r in self.results if r.status == "error"]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain data."""
        content = asdict(self) | {"ok": self.ok, "failed": self.failed}
        del content["interim"]  # of use meanwhile
        return ORIGIN | content

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def raise_for_failures(self) -> None:
        """Raise AssertionError with all failures, if there are any."""
        __tracebackhide__ = True
        bad = [r for r in self.results if r.status in BAD]
        if bad:
            lines = [f"{self.model}: {self.verdict}"]
            lines += [f"{r.name}: {r.message}" for r in bad]
            raise AssertionError("\n".join(lines))

    @property
    def verdict(self) -> str:
        """The last line of the table."""
        counts = Counter(result.status for result in self.results)
        words = {status: f"{n} {status}" for status, n in counts.items()}
        passed = [r for r in self.results if r.status == "passed"]
        if part := sum(bool(result.not_tried) for result in passed):
            words["passed"] += f" ({part} of them in part)"
        text = ", ".join(
            words[status] for status in STATUSES if counts[status]
        )
        text = text or "no check was run"
        if self.interrupted:
            text += "; interrupted"
        names = [name.removeprefix("check_") for name in self.left_out]
        if len(names) == 1:
            text += f"; not run: {names[0]} (--only {names[0]} runs it)"
        elif names:
            text += f"; {len(names)} others not run (check --list shows them)"
        return text

    def table(
        self, width: int = WIDTH, statuses: Collection[str] = STATUSES
    ) -> str:
        """Return the table as text: rows that have one of the statuses."""
        found = [r for r in self.results if r.status in statuses]
        rows = [self.row(result, width) for result in found]
        return "\n".join([self.heading(width), *rows, self.ending(width)])

    def __str__(self) -> str:
        # a name may hold codes that colour or clear a terminal
        return CONTROL.sub(lambda found: ascii(found[0])[1:-1], self.table())

    __repr__ = __str__  # pytest prints it below `assert report.ok, report`

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<tr style="text-align: left; vertical-align: top"><td>{r.name}'
            f'</td><td style="color: {COLOURS.get(r.status, "gray")}">'
            f"{r.status}</td><td>{r.seconds:.2f} s</td>"
            f"<td>{html.escape(r.message)}</td></tr>"
            for r in self.results
        )
        heading = self.heading(WIDTH).rpartition("\n")[0]
        table = f'<table style="text-align: left">{cells}</table>'
        return as_html(heading) + table + as_html(self.ending(WIDTH))

    def heading(self, width: int) -> str:
        """Return what is known before the first check."""
        grounds = f"of the same sources and weights ({self.kept})"
        kept = f"kept from an earlier run {grounds}"
        lines = [
            f"{self.model}: {self.vocab_size:,} tokens, sequences to "
            f"{self.block_size:,}",
            *([f"{kept}; --fresh runs again"] if self.kept else []),
            *textwrap.wrap(self.plan, width),
            self._line(("check", "", "s"), "what was found", width),
        ]
        return "\n".join(lines)

    def row(self, result: CheckResult, width: int, brief: bool = False) -> str:
        """Return the lines of a check that has ended.

        A failure has a line for each part of its message. With `brief` a
        check that passed without a reservation has one line, cut at a comma
        or the like; "..." says so.
        """
        start = (result.name, result.status, f"{result.seconds:.2f}")
        parts = [result.message]
        if result.status in BAD:
            parts = re.split(r"(?<=;) (?![^(]*\))", result.message)
        short = brief and result.status == "passed" and not _reserved(result)
        starts = [start, *[("", "", "")] * len(parts)]
        text = "\n".join(
            self._line(start, part, width, short)
            for start, part in zip(starts, parts, strict=False)
        )
        return re.sub(r"[;:,] (?!\d)[^;:,]* \.\.\.$", " ...", text)

    def cells(
        self, result: CheckResult, width: int, brief: bool = False
    ) -> tuple[str, str, str]:
        """Return a row in three: before its status, the status, the rest."""
        text = self.row(result, width, brief)
        start = self._name_width + len(GAP)
        end = start + len(result.status)
        return text[:start], text[start:end], text[end:]

    def ending(self, width: int) -> str:
        """Return the longer texts, the notes and the verdict."""
        lines = [f"\n{n}:\n{text}" for n, text in self.details.items()]
        texts = [*(f"note: {note}" for note in self.notes), self.verdict]
        return "\n".join([*lines, *(textwrap.fill(t, width) for t in texts)])

    @property
    def _name_width(self) -> int:
        return max(map(len, ["check", *self.names]))

    def _line(
        self, cells: Cells, message: str, width: int, short: bool = False
    ) -> str:
        name, status, seconds = cells
        columns = f"{name:<{self._name_width}}", f"{status:8}", f"{seconds:>6}"
        start = GAP.join((*columns, ""))
        return textwrap.fill(
            start + message,
            max(width, len(start) + 20),
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,  # the names of options
            max_lines=1 if short else None,
            placeholder=" ...",
        )


def _reserved(result: CheckResult) -> bool:
    """Whether a check that passed has left something open, or assumed it."""
    proof = result.proof or {"proved": True}
    kinds = ("conditions", "left_out", "never_given", "assumptions", "open")
    open_part = any(map(proof.get, kinds)) or not proof["proved"]
    return bool(result.not_tried) or open_part
