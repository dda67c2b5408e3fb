"""The ways of running a model, and which checks try each: one table.

A way says how a call is made. The copy of the model that is called (its
dtype, larger weights) is the matter of `variant` and `larger_weights`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from .model.building import Model
from .model.calling import MASK, Caller

if TYPE_CHECKING:
    from .subject import Subject

CAUSALITY, PREFIX = "check_causality", "check_prefix_consistency"
ROWS, AGAIN = "check_batch_independence", "check_determinism"


def _positions(tokens: Tensor) -> Tensor:
    at = torch.arange(tokens.size(1), device=tokens.device)
    return at.expand(len(tokens), -1).clone()


def _segments(tokens: Tensor) -> Tensor:
    return (_positions(tokens) >= tokens.size(1) // 2).long()


# Optional arguments, as users give them: two segments, and positions.
OPTIONAL: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("position_ids", "positions", "pos_ids"), _positions),
    **dict.fromkeys(("token_type_ids", "segment_ids"), _segments),
}


@dataclass(frozen=True)
class Way:
    """One way to call a model, and what a failure says about it."""

    name: str = ""  # "in train mode", "with gradients recorded", ...
    training: bool = False  # in train mode, where each call has one seed
    grad: bool = False  # whether gradients are recorded
    # where what an attention mask shows starts and ends, as shares of the
    # length; None: no mask is given
    visible: tuple[float, float] | None = None
    boolean: bool = False  # the mask is one of booleans, not of integers
    targets: bool = False  # given to the model's own call
    losses: bool = False  # the loss at each position is read, not its scores
    own: bool = False  # the model itself is called, not its log_probs
    given: str = ""  # an optional argument
    # around the call
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    crowd: bool = False  # the call has more than 4,096 tokens

    @property
    def mode(self) -> str:
        """The mode as messages name it."""
        return "in train mode" if self.training else "in eval mode"

    def shown(self, time: int) -> range:
        """Return the positions that no mask hides."""
        first, last = self.visible or (0.0, 1.0)
        return range(int(first * time), math.ceil(last * time))

    def fits(self, caller: Caller) -> bool:
        """Whether the model can be called in this way."""
        return (
            (self.visible is None or caller.takes_mask)
            and (not self.own or caller.method is not None)
            and (not self.given or self.given in caller.optional)
            and (not self.targets or caller.target_name is not None)
        )

    def call(
        self,
        caller: Caller,
        model: Model,
        tokens: Int[Tensor, "batch time"],
        extra: dict[str, Tensor],
    ) -> Any:
        """Return the model's answer to tokens and what the way adds."""
        extra = self.arguments(tokens, caller) | extra
        with self.within():
            if self.own or self.targets:
                return caller.call_own(model, tokens, **extra)
            return caller.call(model, tokens, **extra)

    def arguments(
        self, tokens: Int[Tensor, "batch time"], caller: Caller
    ) -> dict[str, Tensor]:
        """Return what a call gets beside its tokens."""
        extra = {}
        if self.visible is not None:
            mask = torch.zeros_like(tokens)
            mask[:, self.shown(tokens.size(1))] = 1
            extra[MASK] = mask.bool() if self.boolean else mask
        if self.given:
            extra[self.given] = OPTIONAL[self.given](tokens)
        if self.targets and caller.target_name is not None:
            # the same for each row and, to its length, for each text
            at = _positions(tokens)
            extra[caller.target_name] = (7 * at + at // 3) % 2
        return extra


EVAL = Way()
TRAIN = Way("in train mode", training=True, grad=True)
WITH_GRADIENTS = Way("with gradients recorded", grad=True)
TRAIN_WITHOUT_GRADIENTS = Way("in train mode without gradients", training=True)
SHOWN = {  # by a mask, as shares of the length
    "a full": (0.0, 1.0),
    "a left-padded": (0.3, 1.0),
    "a right-padded": (0.0, 0.7),
}
MODES = (("", False), ("in train mode ", True))
MASKED = tuple(
    Way(
        f"{where}with {name} {kind}attention mask",
        training,
        training,
        visible,
        boolean=bool(kind),
    )
    for kind in ("", "boolean ")
    for where, training in MODES
    for name, visible in SHOWN.items()
)
TARGETS, TRAIN_TARGETS = (
    Way(f"{where}with targets", training, training, targets=True)
    for where, training in MODES
)
LOSSES = Way(
    "in train mode by the loss at each position",
    True,
    targets=True,
    losses=True,
)
OWN, TRAIN_OWN = (
    Way(f"{where}in the model's own call", training, training, own=True)
    for where, training in MODES
)
GIVEN = tuple(
    Way(f"{where}with {name}", training, training, given=name)
    for name in OPTIONAL
    for where, training in MODES
)
INFERENCE = Way("in inference mode", within=torch.inference_mode)


def _autocast() -> AbstractContextManager[Any]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(kind, torch.bfloat16)


AUTOCAST, TRAIN_AUTOCAST = (
    Way(f"{where}under autocast", training, training, within=_autocast)
    for where, training in MODES
)
CROWD = Way("in a call of more than 4,096 tokens", crowd=True)

# Which checks try each way; one that a model cannot be called in is left out.
TRIED: dict[Way, tuple[str, ...]] = {
    EVAL: (CAUSALITY, PREFIX, ROWS, AGAIN, "check_loss"),
    TRAIN: (CAUSALITY, "check_loss"),
    WITH_GRADIENTS: (CAUSALITY, AGAIN, "check_loss"),
    TRAIN_WITHOUT_GRADIENTS: (CAUSALITY, ROWS),
    TARGETS: (CAUSALITY, PREFIX, ROWS, AGAIN),
    TRAIN_TARGETS: (CAUSALITY, ROWS),
    LOSSES: (CAUSALITY,),
    OWN: (CAUSALITY, PREFIX, ROWS, AGAIN),
    TRAIN_OWN: (CAUSALITY,),
    **dict.fromkeys((*MASKED, *GIVEN), (CAUSALITY,)),
    **dict.fromkeys((INFERENCE, AUTOCAST, TRAIN_AUTOCAST), (CAUSALITY,)),
    CROWD: (CAUSALITY, ROWS),
}


def ways_of(check: str, subject: "Subject") -> list[Way]:
    """Return the ways that a check tries with a model, in their order."""
    return [
        way
        for way, checks in TRIED.items()
        if check in checks
        and way.fits(subject.caller)
        and way not in subject.unanswered
    ]


def to_be_met(caller: Caller) -> list[Way]:
    """Return the ways that a model may answer without scores, or refuse."""
    ways = (TARGETS, TRAIN_TARGETS, LOSSES, OWN, TRAIN_OWN, *GIVEN)
    return [way for way in ways if way.fits(caller)]
