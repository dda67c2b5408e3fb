"""The ways of running that a proof goes through."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..model.building import KeptState
from ..subject import Subject
from ..tokens import SHORT, lengths_to_try
from ..variant import CROWD_OF, Variant
from ..ways import CAUSALITY, EVAL, TRAIN, Way, ways_of
from .engine import Tokens
from .lattice import LONGEST

FEW = (5, SHORT - 1)  # of the other ways: no block of 8 divides them
FIRST = 2  # lengths before these ways, where time is short
MIDDLE = (24, 100)  # lengths of texts as people have them
HEAVY_LENGTHS = (33, 64)
DRAWN = 4  # lengths from the seed
ROOM = 1 << 26  # scores of a call of many tokens


@dataclass(frozen=True)
class Run:
    """A model that is run in one way."""

    variant: Variant
    kept: KeptState | None

    def reset(self) -> None:
        """Put back what the model held when it was built."""
        if self.kept is not None:
            self.kept.put_back(always=True)
        self.variant.start_again()  # here, where no operation is followed

    @property
    def parameters(self) -> list[Tensor]:
        """The numbers that can have any value."""
        model = self.variant.model
        if not isinstance(model, nn.Module):
            return []
        return list(model.parameters())

    def __call__(
        self, tokens: Tokens, targets: Tokens | None
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores."""
        seed = self.variant.subject.seed
        return self.variant.scores(tokens, seed=seed, targets=targets)


@dataclass(frozen=True)
class Case:
    """One way to run a model.

    Attributes:
        way: of calling it.
        rows: of the batch.
        dtype: that a copy is cast to; None: the model's own.
        frozen: whether no weight is trained.
        time: the one length; 0: any.
    """

    way: Way
    rows: int = 1
    dtype: torch.dtype | None = None
    frozen: bool = False
    time: int = 0

    @property
    def name(self) -> str:
        """The case as messages name it."""
        parts = [self.way.name]
        if self.rows > 1:
            parts.append(f"with {self.rows} rows")
        if self.dtype is not None:
            parts.append(f"in {str(self.dtype).split('.')[1]}")
        if self.frozen:
            parts.append("with frozen weights")
        return " ".join(p for p in parts if p) or self.way.mode

    def shown(self, time: int) -> slice:
        """Return the positions that no mask hides."""
        shown = self.way.shown(time)
        return slice(shown.start, shown.stop)


def cases(subject: Subject) -> Iterator[Case]:
    """Yield the ways to run a model beside one row in eval and train mode."""
    for way in ways_of(CAUSALITY, subject):
        if way.losses:
            continue
        if way.crowd:
            time = subject.lengths.fit(128)
            rows = 1 + CROWD_OF // time
            small = rows * time * subject.vocab_size < ROOM
            if small and subject.rows is None and not subject.heavy:
                yield Case(way, rows, time=time)
            continue
        main = way in (EVAL, TRAIN)
        if not main:
            yield Case(way)
        if main or (way.visible is not None and not subject.heavy):
            yield Case(way, rows=2)
    if subject.builder.can_copy and not subject.heavy:
        yield Case(EVAL, frozen=True)
        yield Case(EVAL, dtype=torch.float64)
        for dtype in (torch.bfloat16, torch.float16):
            yield from (Case(way, dtype=dtype) for way in (EVAL, TRAIN))


def accepted(subject: Subject, lengths: Iterable[int]) -> list[int]:
    """Return lengths in their order, or raise ValueError for one refused."""
    ordered = sorted({*lengths})
    for time in ordered:
        if not subject.lengths.accepts(time):
            raise ValueError(
                f"a length of {time} was given; the model takes "
                f"{subject.lengths}"
            )
    return ordered


def usual_lengths(subject: Subject, model: object, limited: bool) -> list[int]:
    """Return the lengths of a proof, what matters most first."""
    longest = min(subject.block_size, LONGEST)
    wanted = {*range(1, SHORT + 1), longest}
    if subject.heavy:
        wanted |= {*HEAVY_LENGTHS}
    elif longest > SHORT:
        wanted |= {*lengths_to_try(model, longest), *MIDDLE}
        wanted |= {
            *torch.randint(
                SHORT, longest, (DRAWN,), generator=subject.generator()
            ).tolist()
        }
    lengths = [
        time
        for time in sorted(wanted)
        if time <= longest and subject.lengths.accepts(time)
    ]
    if limited:  # what matters most
        lengths.sort(key=lambda t: (t not in (2, longest), t <= SHORT))
    return lengths


def plan(
    subject: Subject,
    main: list[Case],
    others: Iterable[Case],
    lengths: list[int],
    limited: bool,
) -> Iterator[tuple[Case, list[int]]]:
    """Yield the ways in their order, each with its lengths.

    Args:
        subject: the model.
        main: ways that are followed at all lengths.
        others: ways at a few of them, or at their own.
        lengths: what matters most first.
        limited: whether time is short: then each way has its turn before
            the rest of the lengths.
    """
    few = {*FEW} if subject.heavy else {*FEW, max(lengths)}
    some = [t for t in lengths if t in few] or lengths[:1]
    first = FIRST if limited else len(lengths)
    yield from ((case, lengths[:first]) for case in main)
    yield from ((case, [case.time] if case.time else some) for case in others)
    if lengths[first:]:
        yield from ((case, lengths[first:]) for case in main)
