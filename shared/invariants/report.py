"""What came out of the checks, as a table and as JSON."""

import json
import textwrap
from dataclasses import asdict, dataclass, field

# A terminal's codes for green, bold red, yellow and magenta.
COLOURS = {
    "passed": "32",
    "failed": "1;31",
    "skipped": "33",
    "expected": "35",
    "error": "1;31",
}


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        name: of the check.
        status: "passed", "failed", "skipped", "expected", or "error" where
            the check itself broke, which says nothing about the model.
        message: what was tried, what failed, or why it was skipped.
        seconds: it took.
    """

    name: str
    status: str
    message: str
    seconds: float


@dataclass
class Report:
    """The outcomes for one model; printed, a table.

    Attributes:
        model: its name.
        vocab_size: number of tokens.
        block_size: longest sequence tried.
        results: in the order of the checks.
        notes: how the model was read, and what it did beside answering.
        details: longer texts by check, such as the map of a leak.
        interrupted: whether it was stopped before its end.
    """

    model: str
    vocab_size: int
    block_size: int
    results: list[CheckResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed, expected failures left out."""
        return [r.name for r in self.results if r.status == "failed"]

    @property
    def ok(self) -> bool:
        """Whether all was tried and nothing failed."""
        return not (self.failed or self.errors or self.interrupted)

    @property
    def errors(self) -> list[str]:
        """Names of the checks that broke themselves: no fault of the model."""
        return [r.name for r in self.results if r.status == "error"]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain data."""
        return asdict(self) | {"ok": self.ok, "failed": self.failed}

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def raise_for_failures(self) -> None:
        """Raise AssertionError with all failures, if there are any."""
        told = [r for r in self.results if r.status in ("failed", "error")]
        if told:
            counts = f"{len(self.failed)} checks failed"
            if self.errors:
                counts += f", {len(self.errors)} broke"
            lines = [f"{self.model}: {counts}"]
            lines += [f"{r.name}: {r.message}" for r in told]
            raise AssertionError("\n".join(lines))

    @property
    def verdict(self) -> str:
        """The last line of the table."""
        counts = {status: 0 for status in COLOURS}
        for result in self.results:
            counts[result.status] += 1
        text = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        text = text or "no check was run"
        return f"{text}; interrupted" if self.interrupted else text

    def table(self, width: int = 110, colour: bool = False) -> str:
        """Return the table as text; colour: with a terminal's codes."""

        def paint(text: str, code: str) -> str:
            return f"\x1b[{code}m{text}\x1b[0m" if colour else text

        def row(name: str, status: str, seconds: str, message: str) -> str:
            start = f"{name:<{names}}  {status:8}  {seconds:>6}  "
            return textwrap.fill(
                start + message,
                max(width, len(start) + 20),
                subsequent_indent=" " * len(start),
                break_on_hyphens=False,
            )

        names = max([5, *(len(result.name) for result in self.results)])
        lines = [
            f"{paint(self.model, '1')}: {self.vocab_size:,} tokens, "
            f"sequences to {self.block_size:,}"
        ]
        notes = [textwrap.fill(f"note: {note}", width) for note in self.notes]
        lines += [paint(note, "2") for note in notes]
        lines.append(paint(row("check", "", "s", "what was found"), "1;36"))
        for r in self.results:
            text = row(r.name, r.status, f"{r.seconds:.2f}", r.message)
            painted = paint(r.status, COLOURS[r.status])
            lines.append(text.replace(r.status, painted, 1))
        for name, detail in self.details.items():
            lines += ["", f"{name}:\n{detail}"]
        lines.append(paint(self.verdict, "1;32" if self.ok else "1;31"))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()
