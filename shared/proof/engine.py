"""One run followed: which tokens each score can depend on; its control."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..running.errors import ModelRaised
from ..running.model.calling import find_loss
from ..running.model.kept_state import KeptState
from ..running.model.reach import Walk
from ..running.operations import UNSET, is_plain
from ..running.places import Place, find_place
from ..running.ranks import largest, on_any
from ..running.variant import Variant
from .codes import CODES, FREE, KNOWN, LONGEST, plain
from .leaving import followed
from .losses import Compared
from .shadows import Notes, Shadows, Step

FEW = 7  # codes that are changed one by one
Tokens = Int[Tensor, "batch time"]
Codes = Int[Tensor, "batch time"]


@dataclass(frozen=True)
class Followed:
    """A Variant as the proof runs it, each time from one state.

    Attributes:
        variant: the model, and how it is called.
        kept: the state: the one that was built, or one after calls.
        moving: names of tensors that calls go on changing: they can have any
            value, as weights can.
        free: other tensors that can.
        derived: codes of tensors that calls compute from weights, by name.
    """

    variant: Variant
    kept: KeptState | None
    moving: tuple[str, ...] = ()
    free: tuple[Tensor, ...] = ()
    derived: dict[str, Tensor] = field(default_factory=dict)

    def reset(self) -> None:
        """Put back what the model held in this state."""
        if self.kept is not None:
            self.kept.put_back(always=True)
        self.variant.start_again()  # here, where no operation is followed

    def unfollowed(
        self, tokens: Tokens, targets: Tokens | None
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores of a plain run."""
        self.reset()
        return self(tokens, targets)

    @property
    def parameters(self) -> list[Tensor]:
        """The numbers that can have any value."""
        held = {} if self.kept is None else self.kept.tensors
        moving = [held[name] for name in self.moving if name in held]
        return [*self.variant.parameters, *moving]

    def shadows(
        self, routing: bool = False, tape: Any = None, **more: Any
    ) -> Shadows:
        """Return what carries the codes of a run, with those of the state."""
        found = Shadows(self.parameters, routing, tape, free=self.free, **more)
        held = {} if self.kept is None else self.kept.tensors
        for name, codes in self.derived.items():
            if name in held:
                found.mark(held[name], codes)
        return found

    def __call__(
        self, tokens: Tokens, targets: Tokens | None
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores, or the loss where that is followed."""
        seed = self.variant.case.seed or self.variant.subject.seed
        if self.variant.case.losses:
            answer = self.variant.answer(tokens, seed=seed, targets=targets)
            loss = find_loss(answer)
            if loss is None:
                raise ModelRaised("no loss comes back with targets")
            return loss.expand(*tokens.shape, 1)
        return self.variant.scores(tokens, seed=seed, targets=targets)


@dataclass(frozen=True)
class Order:
    """An order of the tokens: a score may depend on those up to its bound.

    Attributes:
        name: of what is put in order.
        codes: of each token, from a batch's rows and length.
        target: what is added to a token's code for the target next to it.
        losses: whether a loss is followed, not scores.
        bounds: the largest code that each position's scores may depend on;
            None: its own token's.
        targets: codes of the targets; None: as `target` says.
    """

    name: str
    codes: Callable[[int, int], Codes]
    target: int = 0
    losses: bool = False
    bounds: Callable[[int, int], Codes] | None = None
    targets: Callable[[int, int], Codes] | None = None

    def allowed(self, rows: int, time: int) -> Codes:
        """Return the largest code that each position may depend on."""
        return (self.bounds or self.codes)(rows, time)

    def of_targets(self, rows: int, time: int) -> Codes:
        """Return the codes of targets."""
        if self.targets is not None:
            return self.targets(rows, time)
        return self.codes(rows, time) + self.target


def _positions(rows: int, time: int) -> Codes:
    return torch.arange(time, dtype=CODES).expand(rows, time)


def _rows(rows: int, time: int) -> Codes:
    return torch.arange(rows, dtype=CODES).unsqueeze(1).expand(rows, time)


POSITIONS = Order("positions", _positions, 1)
# of a loss: between two tokens is the target that is the second of them
AS_GIVEN, SHIFTED = (
    Order("positions", lambda b, t: 2 * _positions(b, t), target, True)
    for target in (1, -1)
)
BACKWARDS = Order("positions", lambda b, t: _positions(b, t).flip(1))
RISING_ROWS = Order("rows", _rows)
FALLING_ROWS = Order("rows", lambda b, t: _rows(b, t).flip(0))


@dataclass
class Found:
    """The result of a run.

    Attributes:
        reached: the largest code that a position's scores can depend on.
        allowed: the code of the position's own token.
        notes: what the answer rests on.
        path: a hash of the operations that carried codes, in their order.
        scores: that came out.
    """

    reached: Codes
    allowed: Codes
    notes: Notes = field(default_factory=Notes)
    path: int = 0
    scores: Tensor | None = None

    def open(
        self, shown: Bool[Tensor, "batch time"] | None = None
    ) -> list[list[int]]:
        """Return each [row, position] whose score depends on a later token.

        Shown are the positions that no mask hides; None: all.
        """
        late = self.reached > self.allowed
        if shown is not None:
            late = late & shown
        return late.nonzero().tolist()


def follow(
    run: Any,
    tokens: Tokens,
    targets: Tokens | None = None,
    order: Order = POSITIONS,
    routing: bool = False,
    tape: Callable[[Step], None] | None = None,
) -> Found:
    """Run a model once, and return what its scores can depend on.

    Args:
        run: the model, from tokens and targets to scores.
        tokens: that it is given.
        targets: that it is given, if it takes some.
        order: of the tokens.
        routing: whether integers that a token's own numbers choose are
            taken as known.
        tape: called with each step.
    """
    run.reset()
    shadows = run.shadows(routing, tape)
    allowed = _mark(shadows, tokens, targets, order)
    if order.losses and targets is not None:
        shadows.tape = Compared(shadows, tokens, targets, order.target)
        allowed = torch.full_like(allowed, FREE)
    with followed(shadows):
        scores = run(tokens, targets)
    codes = shadows.codes(scores)
    reached = largest(plain(codes).amax(2).expand(tokens.shape).cpu())
    return Found(reached, allowed, shadows.notes, shadows.path, scores)


def left_by_call(
    run: Followed, tokens: Tokens, targets: Tokens | None = None
) -> dict[str, Tensor | None]:
    """Return the tensors in which a run leaves numbers that vary, by name.

    With the codes of numbers of weights and random draws; None: they are
    of tokens.
    """
    run.reset()
    shadows = run.shadows()
    _mark(shadows, tokens, targets, POSITIONS)
    with followed(shadows):
        run(tokens, targets)
    held = Walk(run.variant.model).tensors
    weights = {*map(id, run.parameters)}
    found = dict[str, Tensor | None]()
    for name, tensor in held.items():
        weight = id(tensor) in weights or isinstance(tensor, nn.Parameter)
        latest = KNOWN if weight else shadows.latest(tensor)
        if latest >= FREE:
            plain_one = latest == FREE and is_plain(type(tensor))
            found[name] = shadows.codes(tensor) if plain_one else None
    run.reset()
    return found


def _mark(
    shadows: Shadows, tokens: Tokens, targets: Tokens | None, order: Order
) -> Codes:
    longest = LONGEST // (1 + order.losses)
    if tokens.size(1) > longest:
        raise ValueError(
            f"a proof is for at most {longest} tokens, got {tokens.size(1)}"
        )
    shadows.mark(tokens, order.codes(*tokens.shape))
    if targets is not None:
        shadows.mark(targets, order.of_targets(*tokens.shape))
    return order.allowed(*tokens.shape)


class Recorded(list[Step]):
    """A tape that keeps each step of a run, as its numbers were."""

    def __call__(self, step: Step) -> None:
        """Keep a step."""
        step.outs = [o.detach().clone() for o in step.outs]
        step.codes = [plain(codes) for codes in step.codes]
        step.call = None
        self.append(step)


@dataclass
class Control:
    """Compares runs with one that carried codes.

    The tokens of one code are changed at a time. A number that moves although
    its code says that it could not shows a wrong rule of ours: the proof is
    void.

    Attributes:
        wrong: an operation whose rule is wrong.
        differed: where a change took another path.
    """

    wrong: tuple[str, Place] | None = None
    parted: Place | None = None

    def look(self, steps: Iterator[Step], code: int, step: Step) -> None:
        """Compare a step after tokens of a code changed with the next one."""
        if self.parted is not None or self.wrong is not None:
            return
        before = next(steps, None)
        if before is None or _kind(before) != _kind(step):
            self.parted = find_place(step.name)
            return
        if before.name in UNSET:
            return
        for old, new, codes in zip(
            before.outs, step.outs, before.codes, strict=True
        ):
            moved = old != new
            if before.routed and bool(moved.any()):
                self.parted = before.place  # another routing
                return
            wrong = moved & (codes < code)
            if wrong.any() and (wrong & ~(old.isnan() & new.isnan())).any():
                self.wrong = before.name, before.place


def _kind(step: Step) -> tuple[object, ...]:
    """Return what the same operation on the same shapes has in common."""
    return step.name, *((o.shape, o.dtype) for o in step.outs)


def changed(
    tokens: Tokens,
    where: Bool[Tensor, "batch time"],
    vocab: int,
    generator: torch.Generator,
    special: Sequence[int] = (),
    share: float = 1.0,
) -> Tokens:
    """Return a copy with other tokens in some places.

    A share of these gets special ids, if there are any; a place that has the
    special id already gets any other.
    """
    shift = torch.randint(1, vocab, tokens.shape, generator=generator)
    other = (tokens + shift.to(tokens.device)) % vocab
    if special:
        drawn = torch.randint(len(special), tokens.shape, generator=generator)
        ids = torch.tensor(special)[drawn].to(tokens)
        kept = torch.rand(tokens.shape, generator=generator) >= share
        kept = kept.to(tokens.device) | (ids == tokens)
        other = torch.where(kept, other, ids)
    return torch.where(where.to(tokens.device), other, tokens)


def control(
    run: Any,
    tokens: Tokens,
    targets: Tokens | None,
    vocab: int,
    order: Order = POSITIONS,
    routing: bool = False,
    seed: int = 0,
    steps: Recorded | None = None,
    special: Sequence[int] = (),
) -> Control:
    """Change a position or a row; return a wrong rule, and where paths differ.

    In a long text all from some positions on are changed together. The
    arguments are those of `follow`, the number of ids, and the steps of that
    run, if they were kept; run must give the same random numbers each time.
    Each position is changed once to any token and once to a special one.
    """
    codes = order.codes(*tokens.shape)

    def through(given: Tokens, **how: Any) -> None:
        run.reset()
        shadows = run.shadows(routing, **how)
        _mark(shadows, given, targets, order)
        with followed(shadows):
            run(given, targets)

    def compared(steps: Recorded) -> Control:
        found, generator = Control(), torch.Generator().manual_seed(seed)
        each = codes.unique().tolist()
        few = len(each) <= FEW
        chosen = each if few else (each[1], each[len(each) // 2], each[-1])
        turns = [(), tuple(special)][: 1 + bool(special and few)]
        for code, ids in product(chosen, turns):
            where = codes == code if few else codes >= code
            other = changed(tokens, where, vocab, generator, ids)
            tape = partial(found.look, iter(steps), code)
            through(other, tape=tape, blind=True)
            if on_any(found.wrong is not None):
                last = "an operation on another rank", steps[-1].place
                found.wrong = found.wrong or last
                break
        return found

    if steps is not None:
        found = compared(steps)
        if found.wrong is None and found.parted is None:
            return found
    # at the first call of a size lru_cache keeps a table, and DTensor plans
    through(tokens)
    steps = Recorded()
    through(tokens, tape=steps)
    return compared(steps)
