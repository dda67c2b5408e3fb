"""One copy of the model, and one way to call it: all checks use it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .budget import Budget
from .errors import ModelRaised, during
from .model.building import KeptState
from .model.calling import MASK
from .model.reading import describe
from .position_losses import position_losses
from .randomness import RecordedDraws, seed_all
from .subject import Subject
from .tokens import rows_at_once
from .ways import EVAL, Way

DROPOUT_SEED = 1234
CROWD_OF = 4096  # tokens in a call of a crowd, and a row more
ENOUGH = 256  # tokens of a call: with more, each costs a heavy model the same


class CopyFailed(Exception):
    """A copy with other weights or dtypes raised, or its scores are NaN."""


@dataclass
class Copy:
    """A copy of the model, and what it held when it was made."""

    model: Any  # as built, or changed
    weights: str = ""  # what a failure says about its weights and dtype
    device: torch.device | None = None  # of its tokens, if another
    may_fail: bool = False  # its exceptions and NaN are no fault of the model
    rough: bool = False  # a heavy one, still in its own precision
    mark: int | None = None  # of targets that its loss leaves out
    built: KeptState | None = None  # before the first call
    kept: KeptState | None = None  # before the first call in train mode


@dataclass(frozen=True)
class Variant:
    """One copy of the model, and one way to call it."""

    subject: Subject
    budget: Budget
    copy: Copy
    way: Way = EVAL

    def __post_init__(self) -> None:
        """Keep the state of a copy whose calls change it."""
        copy = self.copy
        if self.subject.keeps_state and isinstance(copy.model, nn.Module):
            copy.built = copy.built or KeptState(copy.model)

    @property
    def model(self) -> Any:
        """The copy itself."""
        return self.copy.model

    def run_as(self, way: Way) -> "Variant":
        """Return the same copy, called in another way."""
        return replace(self, way=way)

    @property
    def conditions(self) -> str:
        """The words of a failure for the way and the weights."""
        parts = (self.way.name, self.copy.weights)
        return "".join(f", {part}" for part in parts if part)

    @property
    def double(self) -> bool:
        """Whether the copy is in float64."""
        return torch.float64 in {
            p.dtype for p in getattr(self.model, "parameters", list)()
        }

    def rows_at_once(self, time: int) -> int:
        """Return how many sequences go in one call, few to a heavy model."""
        if self.way.crowd:
            return 1 + CROWD_OF // time
        room = rows_at_once(self.subject.vocab_size, time)
        few = max(2, ENOUGH // time)
        return min(room, few) if self.subject.heavy else room

    def scores(
        self,
        tokens: Int[Tensor, "batch time"],
        strict: bool = False,
        **how: Any,
    ) -> Float[Tensor, "batch time vocab"]:
        """Call the model and return its scores in the common form.

        Strict is that of `Reader.read`, all else is as in `answer`; with
        grad the scores have their graph.

        Raises:
            ModelRaised: with the model's own exception as its cause, or for
                an answer without scores of the right shape.
            CopyFailed: where a copy may fail, for NaN and infinity as well.
        """
        (batch, time), rows = tokens.shape, self.subject.rows
        if rows is not None and batch > rows:
            masks = how.pop("mask", None)
            masks = [None] * batch if masks is None else masks.split(rows)
            parts = zip(tokens.split(rows), masks, strict=False)
            return torch.cat(
                [self.scores(ids, strict, mask=m, **how) for ids, m in parts]
            )
        try:
            if self.way.losses:
                scores = position_losses(self, tokens)
            else:
                answer = self.answer(tokens, **how)
                scores = self._read(answer, batch, time, strict)
        except ModelRaised as error:
            if self.copy.may_fail:
                raise CopyFailed(str(error)) from error
            raise
        if scores.is_inference():
            scores = scores.clone()
        self.budget.charge(scores)
        if self.copy.may_fail and not bool(torch.isfinite(scores).all()):
            raise CopyFailed("the scores are not finite")
        return scores if how.get("grad") else scores.detach()

    def _read(
        self, answer: Any, rows: int, time: int, strict: bool
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer, of whichever call of the model."""
        if not (self.way.own or self.way.targets):
            return self.subject.read(answer, rows, time, strict=strict)
        found = self.subject.find(answer, rows, time)
        if found is None:
            raise ModelRaised(
                f"no scores come back {self.way.name}, but {describe(answer)}"
            )
        return self.subject.without_hidden(found)

    def answer(
        self,
        tokens: Int[Tensor, "batch time"],
        *,
        grad: bool = False,
        seed: int | None = None,
        mask: Int[Tensor, "batch time"] | None = None,
        targets: Int[Tensor, "batch time"] | None = None,
        go_on: bool = False,
        as_given: bool = False,
    ) -> Any:
        """Call the model and return its answer, uncounted.

        Args:
            tokens: ids, on any device.
            grad: whether gradients are recorded, also if not by the way.
            seed: of the global generators; None: these go on, and in train
                mode start from a fixed state.
            mask: an attention mask, in place of the way's.
            targets: in place of the way's.
            go_on: whether the copy keeps what the last call left in it.
            as_given: whether it gets these very ids, not a copy of them.
        """
        subject, way = self.subject, self.way
        if not go_on:
            self.start_again()
        if seed is None and way.training and not go_on:
            seed = DROPOUT_SEED
        if seed is None and subject.noisy and not way.training:
            seed = subject.seed
        if seed is not None:
            seed_all(seed)
        if getattr(self.model, "training", way.training) != way.training:
            self.model.train(way.training)
        # what a model does to its input must not reach the next check
        device = self.copy.device or subject.device
        given = tokens.to(device, copy=not as_given)
        named = ((MASK, mask), (subject.caller.target_name, targets))
        extra = {
            name: value.to(device)
            for name, value in named
            if name is not None and value is not None
        }
        what = f"on tokens of shape {tuple(tokens.shape)}, {way.mode}"
        masked = mask is not None or way.visible is not None
        what += ", with an attention mask" * masked
        with during(what), torch.set_grad_enabled(way.grad or grad):
            return way.call(subject.caller, self.model, given, extra)

    def start_again(self) -> None:
        """Put back what the copy held at first: state, running statistics."""
        copy = self.copy
        if not isinstance(copy.model, nn.Module):
            return
        if self.subject.keeps_state:
            copy.built = copy.built or KeptState(copy.model)
            copy.built.put_back(always=True)
        if self.way.training:
            copy.kept = copy.kept or KeptState(copy.model)
            copy.kept.put_back()

    def draws(self, tokens: Int[Tensor, "batch time"]) -> list[tuple]:
        """Return the shapes of all random numbers that a call draws.

        One seed gives equal parts of two texts equal numbers if these match.
        """
        with RecordedDraws() as seen:
            self.scores(tokens)
        return seen.shapes
