"""Store the results of a benchmark, and read their file.

msgspec reads the file, and raises an error if it does not fit the annotations.
"""

import statistics
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, MsgspecError

from .files import STDOUT, release_stdout, write_atomically
from .timing import Quartiles, quartiles, ratios

VERSION = 3
PERCENTS = (50, 90, 99)  # percentiles of the times between decoded tokens

Value = str | int | float | bool
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Row(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A timed model, or a timed limit of the machine (copy, sum, product)."""

    name: str  # name of the model or limit
    seconds: Annotated[list[Seconds], Meta(min_length=1)]  # of each round
    limit: bool = False  # whether the row measures a limit of the machine
    # floating-point operations of one run, if counted
    flops: Count | None = None
    # least bytes that one run must read and write
    least_bytes: Count | None = None
    tokens: Count | None = None  # number of tokens of one run
    output: str = ""  # "logits" or "log-probs"
    parameters: Count | None = None  # number of parameters
    first_seconds: Seconds | None = None  # with warming up and compiling
    peak_bytes: Count | None = None  # most memory of a run, without weights
    # in decoding: the time to the first token, and PERCENTS of the times
    # between two tokens
    first_token: Seconds | None = None
    between_tokens: list[Seconds] = []
    cache_bytes: Count | None = None  # keys and values at the end of the text
    note: str = ""  # a note for the reader of the table
    failed: bool = False  # whether a check or test failed in this run
    operations: dict[str, float] = {}  # written only by older versions

    @property
    def quartiles(self) -> Quartiles:
        """Return the first quartile, median and third quartile in seconds."""
        return quartiles(self.seconds)

    @property
    def median(self) -> float:
        """Return the median of the seconds."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Return tokens per second by the median time; None if not counted."""
        return self.tokens / self.median if self.tokens else None

    def ratio(self, other: "Row") -> float:
        """Return the median ratio of this row's time to the other's.

        If it is above 1, the other row is faster. Both were timed in each
        round, so a slow moment of the machine affects both times, but not
        their ratio.
        """
        return statistics.median(ratios(self.seconds, other.seconds))


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """Models and limits of the machine, measured in the same rounds."""

    what: str  # the measured run: "forward", "generate" or "train-step"
    setting: dict[str, Value]  # the options of the run, by name
    rows: Annotated[list[Row], Meta(min_length=1)]  # the measurements
    reference: str = ""  # name of the row that others are compared with
    notes: list[str] = []  # sentences for the reader

    def __post_init__(self) -> None:
        """Raise ValueError if models have different numbers of rounds."""
        rounds = {len(row.seconds) for row in self.models}
        if len(rounds) > 1:
            raise ValueError(
                f"rows have {min(rounds)} and {max(rounds)} rounds"
            )

    @property
    def models(self) -> list[Row]:
        """Return the rows that measure models, without the limits."""
        return [row for row in self.rows if not row.limit]

    def row(self, name: str) -> Row | None:
        """Return the row of that name, or None."""
        return next((row for row in self.rows if row.name == name), None)

    def rates(self, moved: int) -> tuple[float, float]:
        """Return the best measured operations and bytes per second.

        The bytes per second are those of the largest copies and sums of at
        most `moved` bytes. Smaller ones may fit into a cache of the processor.
        Each result is 0 if no limit was measured.
        """
        machine = [row for row in self.rows if row.limit]
        fit = [r for r in machine if 0 < (r.least_bytes or 0) <= moved]
        most = max((r.least_bytes or 0 for r in fit), default=0)
        products = [(r.flops or 0) / min(r.seconds) for r in machine]
        moves = [
            (r.least_bytes or 0) / min(r.seconds)
            for r in fit
            if 4 * (r.least_bytes or 0) >= most  # a copy moves each byte twice
        ]
        return max(products, default=0), max(moves, default=0)

    def part_of_peak(self, row: Row) -> float | None:
        """Return the share of the machine's best speed that a row reaches.

        The share is the least possible time divided by the measured time. The
        row's operations need some time at the best speed of the large product.
        Its bytes need some time at the best speed of the copies and sums. The
        least time is the longer of the two. Return None if neither operations
        nor bytes were counted.

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
    """The measurements of one command, with facts about the machine."""

    machine: dict[str, Value]
    runs: list[Run]
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write a JSON file, all or nothing, or print it for STDOUT."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        if path == STDOUT:
            release_stdout()
            print(text.decode())
        else:
            write_atomically(path, text.decode() + "\n")


def read_results(path: Path) -> Results:
    """Read a file that `Results.save` wrote; raise ValueError for others."""
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Version).version
        if found != VERSION:
            raise ValueError(
                f"{path} has version {found}, but gpt-duet reads version "
                f"{VERSION}: measure again"
            )
        return msgspec.json.decode(content, type=Results)
    except (OSError, MsgspecError, RecursionError, UnicodeError) as error:
        raise ValueError(f"{path} is not a benchmark: {error}") from None


def read_first_run(path: Path) -> Run:
    """Return the first run of a file; raise ValueError if it has no models."""
    runs = read_results(path).runs
    if not runs or not runs[0].models:
        raise ValueError(f"{path} is not a benchmark: it has no rows of times")
    return runs[0]


class _Version(msgspec.Struct):
    version: int
