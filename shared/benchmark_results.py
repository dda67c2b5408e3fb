"""The results of a benchmark as a file keeps them: one definition, checked.

msgspec reads the file and refuses what does not fit the annotations.
"""

import statistics
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, MsgspecError

from .files import STDOUT, release_stdout, write_atomically
from .timing import Quartiles, quartiles

VERSION = 3
PERCENTS = (50, 90, 99)  # of the times between two tokens

Value = str | int | float | bool
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Row(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that was measured."""

    name: str  # what ran
    seconds: Annotated[list[Seconds], Meta(min_length=1)]  # one number a round
    limit: bool = False  # no model, but something the machine can do
    flops: Count | None = None  # of one run, where they were counted
    least_bytes: Count | None = None  # that one run moves in memory at least
    tokens: Count | None = None  # number of tokens of one run
    output: str = ""  # "logits" or "log-probs"
    parameters: Count | None = None  # number of parameters
    first_seconds: Seconds | None = None  # with warming up, compiling
    peak_bytes: Count | None = None  # most memory of one run, without weights
    # of decoding: the time to the first token, and PERCENTS of the times
    # between two tokens
    first_token: Seconds | None = None
    between_tokens: list[Seconds] = []
    cache_bytes: Count | None = None  # keys and values at the end of the text
    note: str = ""  # what a reader has to know
    failed: bool = False  # what it ran: a check or the tests
    operations: dict[str, float] = {}  # in files of older versions

    @property
    def quartiles(self) -> Quartiles:
        """First quartile, median and third quartile of the seconds."""
        return quartiles(self.seconds)

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second, by the median; None where there are none."""
        return self.tokens / self.median if self.tokens else None

    def ratio(self, other: "Row") -> float:
        """Return the median, over the rounds, of our time over the other's.

        Above 1 the other is faster. Both were measured in every round, so a
        slow moment of the machine is in both and leaves the ratio alone.
        """
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """Things that were measured in turn, in the same rounds."""

    what: str  # "forward", "generate" or "train-step"
    setting: dict[str, Value]  # the options of the run, by name
    rows: Annotated[list[Row], Meta(min_length=1)]  # what was measured
    reference: str = ""  # name of the row that the others are compared to
    notes: list[str] = []  # sentences for the reader

    def __post_init__(self) -> None:
        """Refuse models of different rounds: no ratio could be taken."""
        rounds = {len(row.seconds) for row in self.models}
        if len(rounds) > 1:
            raise ValueError(
                f"rows have {min(rounds)} and {max(rounds)} rounds"
            )

    @property
    def models(self) -> list[Row]:
        """The rows that are no limits."""
        return [row for row in self.rows if not row.limit]

    def row(self, name: str) -> Row | None:
        """Return the row of that name, if there is one."""
        return next((row for row in self.rows if row.name == name), None)

    def rates(self, moved: int) -> tuple[float, float]:
        """Return the operations and bytes a second that were measured at best.

        The bytes are those of a copy or sum of no more than the bytes moved,
        as fewer may come from a cache nearer to the processor, and of those
        the largest. Each is 0 where no limit was measured.
        """
        machine = [row for row in self.rows if row.limit]
        fit = [r for r in machine if 0 < (r.least_bytes or 0) <= moved]
        most = max((r.least_bytes or 0 for r in fit), default=0)
        products = [(r.flops or 0) / min(r.seconds) for r in machine]
        moves = [
            (r.least_bytes or 0) / min(r.seconds)
            for r in fit
            if 4 * (r.least_bytes or 0) >= most  # a copy moves bytes twice
        ]
        return max(products, default=0), max(moves, default=0)

    def part_of_peak(self, row: Row) -> float | None:
        """Return what part of the machine's best speed a row reaches.

        The least time is the longer of two: for the row's operations at the
        best speed of the large product, and for its bytes at that of the
        copies and sums. None where nothing was counted.

        Source: Williams et al. 2009 (Roofline).
        """
        work = row.flops or 0, row.least_bytes or 0
        rates = self.rates(work[1])
        least = [n / rate for n, rate in zip(work, rates, strict=True) if rate]
        return max(least, default=0) / row.median or None

    def described(self) -> str:
        """Return the setting in words: "shape S1, batch 8, ..., compile"."""
        return ", ".join(
            name.replace("_", " ") if value is True else f"{name} {value}"
            for name, value in self.setting.items()
            if value is not False
        )


class Results(msgspec.Struct, forbid_unknown_fields=True):
    """All that one call measured, on one machine that facts describe."""

    machine: dict[str, Value]
    runs: list[Run]
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write a JSON file whole, or leave the old one; or to STDOUT."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        if path == STDOUT:
            release_stdout()
            print(text.decode())
        else:
            write_atomically(path, text.decode() + "\n")


def read_results(path: Path) -> Results:
    """Read what `Results.save` wrote; ValueError for anything else."""
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Version).version
        if found != VERSION:
            raise ValueError(
                f"{path} has version {found}, this reads version {VERSION}: "
                "measure again"
            )
        return msgspec.json.decode(content, type=Results)
    except (OSError, MsgspecError, RecursionError, UnicodeError) as error:
        raise ValueError(f"{path} is no benchmark: {error}") from None


def read_first_run(path: Path) -> Run:
    """Return the first run of a file; ValueError where it has no models."""
    runs = read_results(path).runs
    if not runs or not runs[0].models:
        raise ValueError(f"{path} is no benchmark: it has no rows of times")
    return runs[0]


class _Version(msgspec.Struct):
    version: int
