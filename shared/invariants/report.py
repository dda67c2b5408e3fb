"""Report the results of the checks, as a table and as JSON."""

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

# "schema" is the version of the JSON format. It stays the same if fields are
# added, and increases if a field is removed or changes its meaning.
ORIGIN: dict[str, Any] = {"schema": 1, "version": "unknown"}
# no version: a checkout that is not installed
with suppress(PackageNotFoundError):
    ORIGIN["version"] = version("gpt-duet")
Cells = tuple[str, str, str]  # name, status and seconds
STATUSES = ("passed", "failed", "skipped", "expected", "error")
BAD = ("failed", "error")

# colours in a notebook's table; other statuses are grey
COLOURS = {"passed": "green", "failed": "crimson", "error": "crimson"}
WIDTH = 110  # width of the printed table in columns
GAP = "  "  # between the table's columns

CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")  # all but \t and \n


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    status: str  # one of STATUSES; "error" if the check itself raised
    message: str  # what was tried, what failed, or why it was skipped
    seconds: float
    forwards: int = 0  # calls of the model whose scores were read
    backwards: int = 0  # backward passes that began at these scores
    not_tried: str = ""  # the cases that were not tried, and why
    # the check's proof, from Proof.to_dict
    proof: dict[str, Any] | None = None
    # position, token, length, size, file, line; null if they are unknown
    leak: dict[str, Any] | None = None
    # the lines of a failure, with file and line; the likeliest comes first
    places: list[dict[str, Any]] = field(default_factory=list)


@dataclass(repr=False)
class Report:
    """The results of the checks of one model, which print as a table."""

    model: str
    vocab_size: int
    block_size: int  # the longest sequence that was tried
    names: list[str] = field(default_factory=list)  # the checks in order
    results: list[CheckResult] = field(default_factory=list)
    # how the model was read, and its unusual behaviour
    notes: list[str] = field(default_factory=list)
    # by check: text for the end of the report, such as a map of a leak
    details: dict[str, str] = field(default_factory=dict)
    plan: str = ""  # the available time in words, if it is short
    interim: str = ""  # the progress of the running check
    # checks that did not run
    left_out: list[str] = field(default_factory=list)
    # arguments of the call that no check gives
    never_given: list[str] = field(default_factory=list)
    interrupted: bool = False
    kept: str = ""  # when the report was made, if it is that of an earlier run

    @property
    def failed(self) -> list[str]:
        """Return the failed checks by name, without expected failures."""
        return [r.name for r in self.results if r.status == "failed"]

    @property
    def ok(self) -> bool:
        """Return whether no check failed or raised, and none was cut off."""
        return not (self.failed or self.errors or self.interrupted)

    @property
    def under_way(self) -> str:
        """Return the run's progress as a line; "" if it has ended."""
        done = len(self.results)
        for name in self.names[done:]:
            count = f"({done + 1} of {len(self.names)})"
            return f"{self.interim or name} {count}"
        return ""

    @property
    def errors(self) -> list[str]:
        """Return the names of the checks that raised an error themselves."""
        return [r.name for r in self.results if r.status == "error"]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain data."""
        content = asdict(self) | {"ok": self.ok, "failed": self.failed}
        del content["interim"]  # progress matters only during the run
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
        """Return the last line of the table."""
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
        """Return the table as text, with only the rows of these statuses."""
        found = [r for r in self.results if r.status in statuses]
        rows = [self.row(result, width) for result in found]
        return "\n".join([self.heading(width), *rows, self.ending(width)])

    def __str__(self) -> str:
        # a name may contain codes that colour or clear a terminal
        return CONTROL.sub(lambda found: ascii(found[0])[1:-1], self.table())

    # pytest cuts a long repr: raise_for_failures prints all of it
    __repr__ = __str__

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
        """Return the facts that are known before the first check."""
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
        """Return the lines of the table for a finished check.

        A failure has a line for each part of its message. With `brief`, a
        check that passed without a caveat has one line, which is cut at
        punctuation and marked with "...".
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
        """Return a row in three parts: the start, the status and the rest."""
        text = self.row(result, width, brief)
        start = self._name_width + len(GAP)
        end = start + len(result.status)
        return text[:start], text[start:end], text[end:]

    def ending(self, width: int) -> str:
        """Return the lines after the table: maps, notes and the verdict."""
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
            # keeps names of options such as --quick whole
            break_on_hyphens=False,
            max_lines=1 if short else None,
            placeholder=" ...",
        )


def _reserved(result: CheckResult) -> bool:
    """Return whether a passed check left something unproved or assumed."""
    proof = result.proof or {"proved": True}
    kinds = ("conditions", "left_out", "never_given", "assumptions", "open")
    open_part = any(map(proof.get, kinds)) or not proof["proved"]
    return bool(result.not_tried) or open_part
