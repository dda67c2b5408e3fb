"""What came out of the checks, as a table and as JSON."""

import json
from dataclasses import asdict, dataclass, field

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

COLOURS = {
    "passed": "green",
    "failed": "bold red",
    "skipped": "yellow",
    "expected": "magenta",
}


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        name: of the check.
        status: "passed", "failed", "skipped" or "expected".
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
        return not self.failed and not self.interrupted

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain data."""
        return asdict(self) | {"ok": self.ok, "failed": self.failed}

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def raise_for_failures(self) -> None:
        """Raise AssertionError with all failures, if there are any."""
        if self.failed:
            lines = [f"{self.model}: {len(self.failed)} checks failed"]
            lines += [
                f"{result.name}: {result.message}"
                for result in self.results
                if result.status == "failed"
            ]
            raise AssertionError("\n".join(lines))

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
        table.add_column("check", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("s", justify="right", no_wrap=True)
        table.add_column("what was found")
        for result in self.results:
            table.add_row(
                result.name,
                Text(result.status, style=COLOURS[result.status]),
                f"{result.seconds:.2f}",
                Text(result.message),
            )
        head = Text.assemble(
            (self.model, "bold"),
            f": {self.vocab_size:,} tokens, sequences to {self.block_size:,}",
        )
        parts: list[RenderableType] = [head]
        parts += [Text(f"note: {note}", style="dim") for note in self.notes]
        parts.append(table)
        for name, detail in self.details.items():
            parts += ["", Text(f"{name}:\n{detail}")]
        parts.append(self.verdict)
        return Group(*parts)

    @property
    def verdict(self) -> Text:
        """The last line of the table."""
        counts = {status: 0 for status in COLOURS}
        for result in self.results:
            counts[result.status] += 1
        text = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        text = text or "no check was run"
        if self.interrupted:
            text += "; interrupted"
        colour = "bold green" if self.ok else "bold red"
        return Text(text, style=colour)

    def __str__(self) -> str:
        console = Console(width=110, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())
