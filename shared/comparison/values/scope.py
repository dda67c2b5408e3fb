"""Describe the texts, rows, weights and modes that were compared."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from ...running.places import Place

IDS_SHOWN, NAMES_SHOWN, DROPS_SHOWN = 4, 3, 2


class Kind(Enum):
    """How a trial (a later comparison) differs from the first comparison."""

    FIRST = "first"
    LENGTH = "length"
    SPECIAL = "special ids"
    ROWS = "rows"
    MASKED = "attention mask"
    REDRAWN = "redrawn weights"
    TRAIN = "train mode"


@dataclass(frozen=True)
class Trial:
    """One comparison: its text, weights and mode.

    Attributes:
        kind: how the trial differs from the first comparison.
        tokens: ids of the text.
        mask: an attention mask that both models get, or None.
        ids: special ids that occur in the text.
        size: root mean square of products with scaled matrices; 0: no scaling.
    """

    kind: Kind
    tokens: Int[Tensor, "batch time"] = field(compare=False)
    mask: Bool[Tensor, "batch time"] | None = field(
        default=None, compare=False
    )
    ids: tuple[int, ...] = ()
    size: float = 0.0

    @property
    def training(self) -> bool:
        """Return whether both models run in train mode."""
        return self.kind is Kind.TRAIN

    @property
    def words(self) -> str:
        """Return the trial in words, for a sentence."""
        rows, time = self.tokens.shape
        if self.kind is Kind.LENGTH:
            return f"at {time:,} tokens"
        if self.kind is Kind.SPECIAL:
            return f"on a text with {_ids(self.ids)}"
        if self.kind is Kind.ROWS:
            padded = f", padded with {_ids(self.ids)}" if self.ids else ""
            return f"on {rows} rows of {time} tokens{padded}"
        if self.kind is Kind.MASKED:
            return f"on {rows} rows with a left-padded attention mask"
        if self.kind is Kind.REDRAWN:
            larger = f", matrices scaled up to {self.size:.3g}"
            return f"with redrawn zeros and ones{larger * bool(self.size)}"
        if self.kind is Kind.TRAIN:
            return "in train mode, each dropped share at its mean"
        return f"at {time} tokens"

    def to_json(self) -> dict[str, Any]:
        """Return the trial, ready for JSON."""
        return {
            "kind": self.kind.value,
            "rows": self.tokens.size(0),
            "length": self.tokens.size(1),
            "ids": [*self.ids],
            "size": self.size,
            "words": self.words,
        }


@dataclass(frozen=True)
class Drop:
    """A line that drops entries of a value in train mode.

    Attributes:
        place: the line.
        share: the share of the entries that become 0.
        count: how many entries the line gets in all of its calls.
    """

    place: Place
    share: float
    count: int

    def __str__(self) -> str:
        return f"{self.share:.3g} of {self.count:,} numbers at {self.place}"


@dataclass(frozen=True)
class Dropped:
    """The dropout that each side has and the other side lacks.

    Attributes:
        names: the names of the two sides.
        left: the lines at which only the left drops entries.
        right: the lines at which only the right drops entries.
        without: for each model, whether its code has no dropout at all.
        fault: whether both models are copies of one implementation, so that
            the difference is a fault.
    """

    names: tuple[str, str]
    left: tuple[Drop, ...]
    right: tuple[Drop, ...]
    without: tuple[bool, bool]
    fault: bool

    @property
    def words(self) -> str:
        """Return the difference in words, for a sentence."""
        said = []
        for i, drops in enumerate((self.left, self.right)):
            if self.without[i]:
                said.append(f"{self.names[i]} is written without dropout")
            if drops:
                more = len(drops) - DROPS_SHOWN
                shown = ", ".join(map(str, drops[:DROPS_SHOWN]))
                shown += f" and {more} more" * (more > 0)
                said.append(f"only {self.names[i]} drops {shown}")
        return "; ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Return the difference, ready for JSON."""

        def shown(drops: Sequence[Drop]) -> list[dict[str, Any]]:
            return [
                {"place": d.place.to_dict(), "share": d.share} for d in drops
            ]

        return asdict(self) | {
            "left": shown(self.left),
            "right": shown(self.right),
        }


@dataclass(frozen=True)
class Scope:
    """The texts, weights and modes that a verdict covers.

    Attributes:
        rows, length: size of the first text, whose values are paired.
        recorded: whether a side is a recording, which has only one text.
        lengths: lengths of the longer texts whose scores were compared.
        batch: number of different rows in the compared batch; 0 if none was.
        padded: whether the rows of this batch are padded.
        masked: whether both models also ran with a padding mask.
        ids: special ids in the texts.
        redrawn: how many vectors with all entries equal got random entries.
        constant: names of such vectors that have no counterpart.
        sizes: as Trial.size, for each trial with scaled matrices.
        trained: whether scores in train mode were compared.
        dropped: how dropout differs; None if it does not.
        left_out: what was not compared, and why.
    """

    rows: int
    length: int
    recorded: bool = False
    lengths: tuple[int, ...] = ()
    batch: int = 0
    padded: bool = False
    masked: bool = False
    ids: tuple[int, ...] = ()
    redrawn: int = 0
    constant: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()
    trained: bool = False
    dropped: Dropped | None = None
    left_out: tuple[str, ...] = ()

    def without(self, *reasons: str) -> "Scope":
        """Return the scope with more reasons why trials were left out."""
        return replace(self, left_out=(*self.left_out, *reasons))

    @property
    def words(self) -> str:
        """Return the texts, weights and modes in words, to end a sentence."""
        rows = f"{self.rows} rows of " * (self.rows > 1)
        text = f"compared at {rows}{self.length} tokens"
        if self.recorded:
            return f"{text}: one text, with the weights as they are"
        more = [*filter(None, (self._texts, self._weights, self._mode))]
        return "; ".join([text if more else f"{text} only", *more])

    @property
    def _texts(self) -> str:
        parts = []
        if self.lengths:
            count = len(self.lengths)
            several = f"{count} lengths" if count > 1 else "one length"
            parts.append(f"{several} to {max(self.lengths):,}")
        if self.batch:
            parts.append(f"{self.batch} rows" + ", padded" * self.padded)
        if self.masked:
            parts.append("a padding mask")
        if self.ids:
            parts.append(_ids(self.ids))
        return f"scores at {', '.join(parts)}" if parts else ""

    @property
    def _weights(self) -> str:
        parts = []
        if self.redrawn:
            left = (
                f" but {len(self.constant)} vectors" if self.constant else ""
            )
            parts.append(f"redrawn zeros and ones{left}")
        if self.sizes:
            parts.append("larger weights")
        return f"with {' and '.join(parts)}" if parts else ""

    @property
    def _mode(self) -> str:
        but = " but for dropout" * (self.dropped is not None)
        return f"train mode{but}" if self.trained else ""

    @property
    def notes(self) -> list[str]:
        """Return notes on differences that the comparison cannot find."""
        found = [*self.left_out]
        if self.constant:
            count, names = len(self.constant), self.constant[:NAMES_SHOWN]
            more = ", ..." * (count > NAMES_SHOWN)
            vectors = "vectors" if count > 1 else "vector"
            found.append(
                f"{count} {vectors} of equal numbers without a counterpart on "
                f"the other side ({', '.join(names)}{more}): a missing one "
                f"would not show"
            )
        if self.dropped is not None and not self.dropped.fault:
            found.append(f"dropout differs: {self.dropped.words}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the scope, ready for JSON."""
        dropped = self.dropped
        # asdict must not reach the places in `dropped`, because to_json gives
        # them another form
        rest = asdict(replace(self, dropped=None))
        return rest | {"dropped": dropped and dropped.to_json()}


def _ids(ids: Sequence[int]) -> str:
    """Return special ids in words."""
    if len(ids) > IDS_SHOWN:
        return f"{len(ids)} special ids"
    return "id" + "s" * (len(ids) > 1) + f" {', '.join(map(str, ids))}"
