"""Run a model with dependency codes; test the rules that set them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..running.errors import ModelRaised
from ..running.model.calling import find_loss
from ..running.model.kept_state import KeptState
from ..running.model.reach import Walk
from ..running.operations import UNSET, is_plain
from ..running.places import Place, find_place
from ..running.ranks import largest, on_any
from ..running.variant import Variant
from .codes import CODES, FREE, KNOWN, LONGEST, bounds_of, plain
from .leaving import codes_carried
from .losses import Compared
from .shadows import Notes, Shadows, Step

FEW = 7  # if there are more codes, tokens of several codes change together
Tokens = Int[Tensor, "batch time"]
Codes = Int[Tensor, "batch time"]


@dataclass(frozen=True)
class ModelRun:
    """A model (a Variant) that a proof runs, each time from the same state.

    `follow` runs it with codes; `unfollowed` runs it without.

    Attributes:
        variant: the model, and how it is called.
        kept: the state in which each run starts: as built, or after calls.
        moving: names of tensors that each call changes. Like weights, they can
            have any value.
        free: other tensors that can have any value.
        derived: by name, codes of tensors that calls compute from weights.
    """

    variant: Variant
    kept: KeptState | None
    moving: tuple[str, ...] = ()
    free: tuple[Tensor, ...] = ()
    derived: dict[str, Tensor] = field(default_factory=dict)

    def reset(self) -> None:
        """Restore the model's state."""
        if self.kept is not None:
            self.kept.put_back(always=True)
        self.variant.start_again()  # while no codes are carried yet

    def unfollowed(
        self, tokens: Tokens, targets: Tokens | None
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores of a run that carries no codes."""
        self.reset()
        return self(tokens, targets)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the tensors that can have any value."""
        held = {} if self.kept is None else self.kept.tensors
        moving = [held[name] for name in self.moving if name in held]
        return [*self.variant.parameters, *moving]

    def shadows(
        self, routing: bool = False, tape: Any = None, **more: Any
    ) -> Shadows:
        """Return new Shadows, which carry codes, for the model's state."""
        found = Shadows(
            self.parameters,
            routing,
            tape,
            free=self.free,
            answers=self.variant.subject.answers,
            **more,
        )
        held = {} if self.kept is None else self.kept.tensors
        for name, codes in self.derived.items():
            if name in held:
                found.mark(held[name], codes)
        return found

    def __call__(
        self, tokens: Tokens, targets: Tokens | None
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores, or the loss if the case follows a loss."""
        seed = self.variant.case.seed or self.variant.subject.seed
        if self.variant.case.losses:
            answer = self.variant.answer(tokens, seed=seed, targets=targets)
            loss = find_loss(answer)
            if loss is None:
                raise ModelRaised("the model returns no loss for targets")
            return loss.expand(*tokens.shape, 1)
        return self.variant.scores(tokens, seed=seed, targets=targets)


@runtime_checkable
class CanBeFollowed(Protocol):
    """A ModelRun, or another object that `follow` can run."""

    def reset(self) -> None:
        """Restore the state before a call."""

    def shadows(
        self, routing: bool = False, tape: Any = None, **more: Any
    ) -> Shadows:
        """Return the Shadows that carry dependency codes in one call."""
        ...

    def __call__(self, tokens: Tokens, targets: Tokens | None) -> Any:
        """Return scores."""


@dataclass(frozen=True)
class Order:
    """An order of the tokens: a score may depend on tokens up to its bound.

    Attributes:
        name: the objects that the order ranks: "positions", "rows" or
            "documents".
        codes: returns each token's code, given the count of rows and the
            length of the text.
        target: how much a target's code exceeds that of the token at the same
            position.
        losses: whether a loss is followed instead of scores.
        bounds: like `codes`, returns the largest code that each position's
            scores may depend on; None means the token's own code.
        targets: like `codes`, returns the targets' codes; None means that
            `target` gives them.
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
        """Return the dependency code of the target at each position."""
        if self.targets is not None:
            return self.targets(rows, time)
        return self.codes(rows, time) + self.target


def _positions(rows: int, time: int) -> Codes:
    return torch.arange(time, dtype=CODES).expand(rows, time)


def _rows(rows: int, time: int) -> Codes:
    return torch.arange(rows, dtype=CODES).unsqueeze(1).expand(rows, time)


POSITIONS = Order("positions", _positions, 1)
# Orders for a loss: AS_GIVEN if the caller shifts the targets, SHIFTED if the
# model does. A target's code is 1 less than that of the token it equals.
AS_GIVEN, SHIFTED = (
    Order("positions", lambda b, t: 2 * _positions(b, t), target, True)
    for target in (1, -1)
)
BACKWARDS = Order("positions", lambda b, t: _positions(b, t).flip(1))
RISING_ROWS = Order("rows", _rows)
FALLING_ROWS = Order("rows", lambda b, t: _rows(b, t).flip(0))


@dataclass
class Found:
    """The result of a run that carried dependency codes.

    Attributes:
        reached: for each position, the largest code of a token on which its
            scores can depend.
        allowed: the largest code on which these scores may depend.
        notes: the assumptions on which `reached` rests.
        path: a hash of the operations that carried codes, in their order.
        scores: the scores of the run.
    """

    reached: Codes
    allowed: Codes
    notes: Notes = field(default_factory=Notes)
    path: int = 0
    scores: Tensor | None = None

    def open(
        self, shown: Bool[Tensor, "batch time"] | None = None
    ) -> list[list[int]]:
        """Return each [row, position] whose score a forbidden token can reach.

        `shown` marks positions that no mask hides; None means all positions.
        """
        late = self.reached > self.allowed
        if shown is not None:
            late = late & shown
        return late.nonzero().tolist()


def follow(
    run: CanBeFollowed,
    tokens: Tokens,
    targets: Tokens | None = None,
    order: Order = POSITIONS,
    routing: bool = False,
    tape: Callable[[Step], bool | None] | None = None,
    lean: bool = False,
) -> Found:
    """Run a model once with codes; return on which tokens its scores depend.

    Args:
        run: the model, and how it is called.
        tokens: the tokens of the run.
        targets: the targets, if the model takes targets.
        order: gives each token its code.
        routing: whether integers that route a token, and depend only on that
            token, count as known.
        tape: called with each step (each operation that ran).
        lean: whether to save memory by keeping nothing for a backward pass. If
            the forward pass itself computes gradients, it runs a second time.
    """
    if lean and tape is None:
        backward = _NoBackward()
        with suppress(ModelRaised), backward:
            found = follow(run, tokens, targets, order, routing)
            if not backward.asked:
                return found
    run.reset()
    shadows = run.shadows(routing, tape)
    allowed = _mark(shadows, tokens, targets, order)
    if order.losses and targets is not None:
        shadows.tape = Compared(shadows, tokens, targets, order.target)
        allowed = torch.full_like(allowed, FREE)
    with codes_carried(shadows):
        scores = run(tokens, targets)
    codes = shadows.codes(scores)
    reached = largest(plain(codes).amax(2).expand(tokens.shape).cpu())
    return Found(reached, allowed, shadows.notes, shadows.path, scores)


class _NoBackward(saved_tensors_hooks):
    """Frees tensors that autograd would keep for a backward pass.

    Attributes:
        asked: whether a backward pass asked for a freed tensor.
    """

    def __init__(self) -> None:
        self.asked = False
        super().__init__(lambda tensor: None, self._unpack)

    def _unpack(self, nothing: None) -> Tensor:
        self.asked = True
        raise RuntimeError("this run keeps no numbers for a backward pass")


def left_by_call(
    run: ModelRun, tokens: Tokens, targets: Tokens | None = None
) -> dict[str, Tensor | None]:
    """Return the model's tensors that a call fills with varying numbers.

    A tensor computed only from weights and random draws comes with its codes.
    A tensor computed from tokens comes with None.
    """
    run.reset()
    shadows = run.shadows()
    _mark(shadows, tokens, targets, POSITIONS)
    with codes_carried(shadows):
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
    """Keeps each step (operation that ran) of a run, with its results."""

    def __call__(self, step: Step) -> None:
        """Keep a copy of a step, just after it has run."""
        step.outs = [o.detach().clone() for o in step.outs]
        step.codes = [plain(codes) for codes in step.codes]
        step.lows = [bounds_of(codes)[0] for codes in step.codes]
        step.call = None
        self.append(step)


@dataclass
class RuleTest:
    """Compares runs of changed texts with one that carried codes.

    The tokens of one code are changed at a time. If an entry with a smaller
    code changes, a rule is wrong.

    Attributes:
        wrong: the name and place of an operation with a wrong rule, or None.
        parted: the first line at which a run on a changed text ran another
            operation, or None.
    """

    wrong: tuple[str, Place] | None = None
    parted: Place | None = None

    def look(self, steps: Iterator[Step], code: int, step: Step) -> None:
        """Compare a step with the same step before tokens were changed."""
        if self.parted is not None or self.wrong is not None:
            return
        before = next(steps, None)
        if before is None or _kind(before) != _kind(step):
            self.parted = find_place(step.name)
            return
        if before.name in UNSET:
            return
        for old, new, codes, low in zip(
            before.outs, step.outs, before.codes, before.lows, strict=True
        ):
            if before.routed and bool((old != new).any()):
                self.parted = before.place  # tokens took another route
                return
            if low >= code:  # all numbers of this result may change
                continue
            wrong = (old != new) & (codes < code)
            # a proof assumes that numbers are finite
            if wrong.any() and (wrong & ~(old.isnan() | new.isnan())).any():
                self.wrong = before.name, before.place


def _kind(step: Step) -> tuple[object, ...]:
    """Return a key of a step: its operation, and the shapes of its results."""
    return step.name, *((o.shape, o.dtype) for o in step.outs)


def changed(
    tokens: Tokens,
    where: Bool[Tensor, "batch time"],
    vocab: int,
    generator: torch.Generator,
    special: Sequence[int] = (),
    share: float = 1.0,
) -> Tokens:
    """Return a copy of the tokens that differs at the places in `where`.

    If there are special ids, a `share` of the new tokens are special. A place
    that already has the special id drawn for it gets any other id.
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


@dataclass(frozen=True)
class _Turn:
    """Tokens to change together, and the numbers that must not change.

    Attributes:
        where: the places (row, position) of the tokens.
        ids: special ids for these places; () means any ids.
        codes: pairs of an order's index and a code. In that order, entries
            with a smaller code must not change.
    """

    where: Bool[Tensor, "batch time"]
    ids: tuple[int, ...]
    codes: list[tuple[int, int]]


def _turns(each: list[Codes], special: Sequence[int]) -> list[_Turn]:
    """Group the tokens to change into turns, given each order's codes.

    Orders that change the same tokens share a turn.
    """
    turns = dict[tuple[bytes, tuple[int, ...]], _Turn]()
    for number, codes in enumerate(each):
        found = codes.unique().tolist()
        few = len(found) <= FEW
        chosen = (
            found if few else (found[1], found[len(found) // 2], found[-1])
        )
        kinds = [(), tuple(special)][: 1 + bool(special and few)]
        for code, ids in product(chosen, kinds):
            where = codes == code if few else codes >= code
            key = where.cpu().numpy().tobytes(), ids
            turn = turns.setdefault(key, _Turn(where, ids, []))
            turn.codes.append((number, code))
    return [*turns.values()]


def try_changed_tokens(
    run: CanBeFollowed,
    tokens: Tokens,
    targets: Tokens | None,
    vocab: int,
    orders: Sequence[Order] = (POSITIONS,),
    routing: bool = False,
    seed: int = 0,
    steps: Sequence[Recorded | None] = (None,),
    special: Sequence[int] = (),
) -> RuleTest:
    """Change tokens; find a wrong rule, or a line where tokens choose a path.

    In a short text, each token is changed in turn. In a long text, all tokens
    from some position on are changed together. `vocab` is the number of ids.
    `steps` has the steps of an earlier run in each order, if they were kept.
    The other arguments are those of `follow`. `run` must draw the same random
    numbers each time.
    """
    turns = _turns([order.codes(*tokens.shape) for order in orders], special)

    def through(given: Tokens, order: Order, **how: Any) -> None:
        run.reset()
        shadows = run.shadows(routing, **how)
        _mark(shadows, given, targets, order)
        with codes_carried(shadows):
            run(given, targets)

    def compared(kept: Sequence[Recorded]) -> RuleTest:
        generator = torch.Generator().manual_seed(seed)
        found = RuleTest()
        for turn in turns:
            other = changed(tokens, turn.where, vocab, generator, turn.ids)
            each = [(iter(kept[n]), code) for n, code in turn.codes]

            def look(step: Step, each: Any = each) -> None:
                for before, code in each:
                    found.look(before, code, step)

            through(other, orders[0], tape=look, blind=True)
            if on_any(found.wrong is not None):
                place = kept[0][-1].place
                last = "an operation on another rank", place
                found.wrong = found.wrong or last
                break
        return found

    kept = [tape for tape in steps if tape is not None]
    if len(kept) == len(orders):
        found = compared(kept)
        if found.wrong is None and found.parted is None:
            return found
    # This extra call fills caches (lru_cache, DTensor's plans), so that the
    # compared calls run the same operations.
    through(tokens, orders[0])
    kept = [Recorded() for _ in orders]
    for order, tape in zip(orders, kept, strict=True):
        through(tokens, order, tape=tape)
    return compared(kept)
