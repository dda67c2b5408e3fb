"""List the cases (ways to call a model) for the proof and the tests.

A Case says how the model is called (mode, gradients, mask, targets, ...), on
which copy of the model (dtype, frozen or larger weights), and with how many
rows.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .model.building import Model
from .model.calling import Caller
from .model.inputs import (
    KINDS,
    MASK,
    MASK_AND_TARGETS,
    SHOWN,
    TARGETS_TOO,
    TOGETHER,
    Input,
    labels,
    shown,
)
from .operations import as_compiled
from .subject import Subject
from .tokens import SHORT, lengths_to_try

Tokens = Int[Tensor, "batch time"]

CAUSALITY, PREFIX = "check_causality", "check_prefix_consistency"
ROWS, AGAIN = "check_batch_independence", "check_determinism"
LOSS = "check_loss"
BATCHES = CAUSALITY, ROWS

CROWD_OF = 4096  # more tokens than this make a crowded call
CROWD_TIME = 128  # tokens in each row of a crowded call
ROOM = 1 << 26  # most scores of a call that a proof follows
LARGER = "larger weights"
MODERATE = 1.5  # size of products with a matrix, as after a short training
EXTREME = (300.0, 100.0, 30.0, 10.0, 3.0)  # scores reach 300 squared, or 1e5


@dataclass(frozen=True)
class Case:
    """A way to call a model: its arguments, its mode, and the copy to call."""

    how: str = ""  # the call, in words: "in train mode", "with targets", ...
    training: bool = False  # whether in train mode, with a fixed seed
    grad: bool = False  # whether gradients are recorded
    # which positions an attention mask shows: start and end as shares of the
    # length; None means no mask
    visible: tuple[float, float] | None = None
    boolean: bool = False  # whether the mask holds booleans, not integers
    targets: bool = False  # whether the model's own call gets targets
    losses: bool = False  # whether losses of positions are read, not scores
    own: bool = False  # whether to call the model, not its log_probs
    # calls the model in another way than by its signature
    pieces: Callable[[Model, Tokens], Any] | None = None
    kind: str = ""  # the case is for all arguments of this kind
    given: Input | None = None  # an argument of this kind
    # a context for the call
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    crowd: bool = False  # whether the call has more than 4,096 tokens
    rows: int = 1  # rows of a batch that a proof follows
    # places in the batch whose arguments the rows get; () means 0, 1, 2, ...
    places: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # dtype of the copy; None: the model's
    compiled: bool = False  # whether the compiled program runs
    frozen: bool = False  # whether no weight of the copy is trainable
    size: float = 0.0  # size to scale products up to; 0: no scaling
    changed: str = ""  # changes of the copy, in words
    seed: int = 0  # seed of the call; 0 means the usual one

    @property
    def mode(self) -> str:
        """Return the mode in words, for messages."""
        return "in train mode" if self.training else "in eval mode"

    @property
    def copy(self) -> str:
        """Return how the copy differs from the model, in words."""
        larger = f"weights scaled up to activations of {self.size:.0f}"
        larger = LARGER if self.size == MODERATE else larger
        parts = (
            f"in {str(self.dtype).split('.')[-1]}" * (self.dtype is not None),
            "with frozen weights" * self.frozen,
            f"with {larger}" * bool(self.size),
            f"with {self.changed}" * bool(self.changed),
        )
        return " ".join(filter(None, parts))

    @property
    def name(self) -> str:
        """Return the call, its rows and the copy in words, for messages."""
        rows = f"with {self.rows} rows" * (self.rows > 1)
        parts = (self.how, rows, self.copy)
        return " ".join(filter(None, parts)) or self.mode

    def of(self, caller: Caller) -> "list[Case]":
        """Return this case, or one for each argument of the case's kind."""
        if not self.kind or self.given is not None:
            return [self]
        given = [each for each in caller.inputs if each.kind == self.kind]
        return [self.with_input(each) for each in given]

    def with_input(self, given: Input) -> "Case":
        """Return the case with one argument of the case's kind."""
        how = "in train mode " * self.training + f"with {given.words}"
        how += " and targets" * self.targets
        shares, own = given.visible, given.own
        return replace(self, how=how, given=given, own=own, visible=shares)

    def shown(self, rows: int, time: int) -> Bool[Tensor, "rows time"]:
        """Return the positions that no mask hides, in each row."""
        if self.visible is None:
            return torch.ones(rows, time, dtype=torch.bool)
        return shown(self.visible, torch.empty(rows, time), self.places).bool()

    def at(self, *rows: int) -> "Case":
        """Return the case for rows that have these places in their batch."""
        return replace(self, places=rows)

    @property
    def keeps(self) -> bool:
        """Return whether a call may leave a cache in the model."""
        return self.given is not None and self.given.keeps

    @property
    def of_several(self) -> bool:
        """Return whether a call has several arguments, counting targets."""
        kind = self.given.kind if self.given is not None else ""
        return kind in (TOGETHER, MASK_AND_TARGETS, TARGETS_TOO)

    @property
    def unlike(self) -> bool:
        """Return whether the rows of a batch get different arguments."""
        given = self.given
        packed = given is not None and given.packed and not given.single
        return self.visible is not None or packed

    @property
    def words(self) -> str:
        """Return the arguments in words, for a proof; "" for padding masks."""
        if self.given is None:
            return ""
        return self.given.words + " and targets" * self.targets

    def fits(self, caller: Caller) -> bool:
        """Return whether the model can be called in this case."""
        return (
            not self.compiled  # `compiled.py` runs such cases
            and (self.visible is None or caller.takes_mask or bool(self.given))
            and (not self.own or caller.method is not None)
            and (not self.targets or caller.target_name is not None)
        )

    def call(
        self,
        caller: Caller,
        model: Model,
        tokens: Tokens,
        extra: dict[str, Tensor],
    ) -> Any:
        """Return the model's answer to tokens and the case's arguments."""
        extra = self.arguments(tokens, caller) | extra
        parameters = getattr(model, "parameters", list)
        kinds = (p.dtype for p in parameters() if p.is_floating_point())
        dtype = next(kinds, None) if self.given is not None else None
        for name, value in extra.items() if dtype else ():
            if isinstance(value, Tensor) and value.is_floating_point():
                extra[name] = value.to(dtype)
        with self.within():
            if self.pieces is not None:
                return self.pieces(model, tokens)
            own = self.own or self.targets
            return caller.call(model, tokens, extra, own)

    def arguments(self, tokens: Tokens, caller: Caller) -> dict[str, Any]:
        """Return the arguments of a call besides its tokens."""
        extra: dict[str, Any] = {}
        if self.given is not None:
            made = self.given.make(tokens, self.places)
            for name, value in made.items():
                is_tensor = isinstance(value, Tensor)
                extra[name] = value.to(tokens.device) if is_tensor else value
        elif self.visible is not None:
            mask = shown(self.visible, tokens, self.places)
            extra[MASK] = mask.bool() if self.boolean else mask
        if self.targets and caller.target_name is not None:
            extra[caller.target_name] = labels(tokens)
        return extra


def _autocast() -> AbstractContextManager[Any]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(kind, torch.bfloat16)


def _modes(how: str, **more: Any) -> tuple[Case, Case]:
    """Return a case in eval mode, and the same case in train mode."""
    train = Case(f"in train mode {how}", training=True, grad=True, **more)
    return Case(how, **more), train


EVAL = Case()
TRAIN = Case("in train mode", training=True, grad=True)
WITH_GRADIENTS = Case("with gradients recorded", grad=True)
TRAIN_WITHOUT_GRADIENTS = Case(
    "in train mode without gradients", training=True
)
MASKED = tuple(
    _modes(
        f"with {name} {kind}attention mask", visible=at, boolean=bool(kind)
    )[training]
    for kind in ("", "boolean ")
    for training in (False, True)
    for name, at in SHOWN.items()
)
TARGETS, TRAIN_TARGETS = _modes("with targets", targets=True)
LOSSES = Case(
    "in train mode by the loss at each position",
    training=True,
    targets=True,
    losses=True,
)
OWN, TRAIN_OWN = _modes("in the model's own call", own=True)
GIVEN = tuple(c for k in KINDS for c in _modes(f"with {k}", kind=k))
WITH_TARGETS = (
    *_modes(f"with {MASK_AND_TARGETS}", kind=MASK_AND_TARGETS, targets=True),
    _modes(f"with {TARGETS_TOO}", kind=TARGETS_TOO, targets=True)[True],
)
INFERENCE = Case("in inference mode", within=torch.inference_mode)
AUTOCAST, TRAIN_AUTOCAST = _modes(
    "under autocast in bfloat16", within=_autocast
)
COMPILED = Case("compiled", within=as_compiled, compiled=True)
CROWD = Case("in a call of more than 4,096 tokens", crowd=True)
FROZEN = Case(frozen=True)
DOUBLE = Case(dtype=torch.float64)
HALF = tuple(
    replace(case, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float16)
    for case in (EVAL, TRAIN)
)
ENLARGED = tuple(replace(DOUBLE, size=size) for size in (MODERATE, *EXTREME))

# The checks that try each case; a case that a model does not take is left out.
CASES: dict[Case, tuple[str, ...]] = {
    EVAL: (CAUSALITY, PREFIX, ROWS, AGAIN, LOSS),
    TRAIN: (CAUSALITY, LOSS),
    WITH_GRADIENTS: (CAUSALITY, AGAIN, LOSS),
    TRAIN_WITHOUT_GRADIENTS: (CAUSALITY, ROWS),
    TARGETS: (CAUSALITY, PREFIX, ROWS, AGAIN),
    TRAIN_TARGETS: (CAUSALITY, ROWS),
    LOSSES: (CAUSALITY,),
    OWN: (CAUSALITY, PREFIX, ROWS, AGAIN),
    TRAIN_OWN: (CAUSALITY,),
    **{
        case: (CAUSALITY,) if case.training or case.boolean else BATCHES
        for case in (*MASKED, *GIVEN)
    },
    **dict.fromkeys(WITH_TARGETS, (CAUSALITY,)),
    **dict.fromkeys((INFERENCE, AUTOCAST, TRAIN_AUTOCAST), (CAUSALITY,)),
    COMPILED: (CAUSALITY,),
    CROWD: (CAUSALITY, ROWS),
    **dict.fromkeys((FROZEN, DOUBLE, *HALF), (CAUSALITY,)),
    **dict.fromkeys(
        ENLARGED[:1], (CAUSALITY, PREFIX, ROWS, "check_causal_gradients", LOSS)
    ),
    **dict.fromkeys(ENLARGED[1:], (CAUSALITY,)),
}


def cases_of(check: str, subject: Subject) -> list[Case]:
    """Return the cases that a check tries on the model as built.

    A program has a single case.
    """
    if subject.is_program:
        return [EVAL] if check in CASES[EVAL] else []
    return [
        case
        for row, checks in CASES.items()
        if check in checks and not row.copy
        for case in row.of(subject.caller)
        if case.fits(subject.caller) and case not in subject.unanswered
        if case != WITH_GRADIENTS or not subject.caller.no_gradients
    ]


def to_be_tried(caller: Caller) -> list[Case]:
    """Return the cases that a model may refuse or answer without scores."""
    rows = (TARGETS, TRAIN_TARGETS, LOSSES, OWN, TRAIN_OWN, *GIVEN, *MASKED)
    rows += WITH_TARGETS
    cases = [case for row in rows for case in row.of(caller)]
    return [case for case in cases if case.fits(caller)]


def refused_with(case: Case) -> list[Case]:
    """Return the masks that need not be tried if this case is refused.

    A refused mask of ones means that each mask of its dtype is refused. A mask
    that is refused in eval mode is also refused in train mode.
    """
    return [
        other
        for other in MASKED
        if other.boolean == case.boolean
        if other.training >= case.training
        if case.visible in (other.visible, SHOWN["a full"])
    ]


def followed_cases(subject: Subject) -> Iterator[Case]:
    """Yield the cases that a proof follows, except the plain one-row call."""
    declared = subject.sees is not None
    for case in cases_of(CAUSALITY, subject):
        if declared and case.visible is not None:
            continue  # a declaration is for unpadded texts
        main = case in (EVAL, TRAIN)
        if case.losses:
            continue
        if case.crowd:
            time = subject.lengths.fit(CROWD_TIME)
            rows = 1 + CROWD_OF // time
            small = rows * time * subject.vocab_size < ROOM
            if small and subject.rows is None and not subject.heavy:
                yield replace(case, rows=rows)
            continue
        two = subject.fit_rows(2) == 2
        unlike = case.unlike and two and not subject.heavy
        if not main and not (case.of_several and unlike):
            yield case
        if (main and two) or unlike:
            yield replace(case, rows=2)
    if subject.builder.can_copy and not subject.heavy:
        yield from (FROZEN, DOUBLE, *HALF)


def losses_with_arguments(subject: Subject) -> Iterator[Case]:
    """Yield cases in which a call with targets gives a loss, but no scores.

    A left-padding mask is left out, because the loss counts hidden tokens.
    """
    for row in WITH_TARGETS:
        for case in row.of(subject.caller) if row.training else ():
            left = case.visible is not None and case.visible[0] > 0
            if not left and case in subject.unanswered:
                yield replace(case, losses=True)


# --- Lengths -----------------------------------------------------------------

BETWEEN = (5, SHORT - 1)  # lengths for all other cases: no multiples of 8
EVERY = 64  # up to this block size each length is proved
USUAL = (24, 100)  # lengths of everyday texts
HEAVY_LENGTHS = (33, 64)
DRAWN = 4  # how many lengths are drawn from the seed


def accepted(subject: Subject, lengths: Iterable[int]) -> list[int]:
    """Return sorted lengths, or raise ValueError if one is refused."""
    ordered = sorted({*lengths})
    for time in ordered:
        if not subject.lengths.accepts(time):
            raise ValueError(
                f"a length of {time} was given; the model takes "
                f"{subject.lengths}"
            )
    return ordered


def usual_lengths(subject: Subject, model: object, longest: int) -> list[int]:
    """Return the lengths to try, sorted, up to `longest`.

    They are all lengths up to SHORT, the longest one, lengths near edges of
    kernels and windows, and some drawn from the seed.
    """
    longest = min(subject.block_size, longest)
    wanted = {*range(1, SHORT + 1), longest}
    if subject.heavy:
        wanted |= {*HEAVY_LENGTHS}
    elif longest > SHORT:
        random = subject.generator()
        drawn = torch.randint(SHORT, longest, (DRAWN,), generator=random)
        wanted |= {*lengths_to_try(model, longest), *USUAL, *drawn.tolist()}
    return [
        time
        for time in sorted(wanted)
        if time <= longest and subject.lengths.accepts(time)
    ]


def lengths_of_proof(
    subject: Subject, model: object, longest: int
) -> list[int]:
    """Return the lengths to prove: all lengths, if they are few."""
    if subject.heavy or subject.block_size > EVERY:
        return usual_lengths(subject, model, longest)
    each = range(1, subject.block_size + 1)
    return [time for time in each if subject.lengths.accepts(time)]
