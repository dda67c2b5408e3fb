"""Replace dropout by its mean, and compare the inputs of dropout.

Dropout multiplies each entry by a random 0 or 1, then scales the result. Here
the mean takes the place of the random number. Dropout then changes nothing, so
two models can be compared in train mode. The inputs of dropout are kept. They
show a dropout that only one model has, or one with another probability.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...running.operations import arguments_of, base_name, tensors_in
from ...running.places import Place, find_place
from ...running.tolerances import DROPPED_SHARE, DROPPED_UNITS
from ...tracing.fused_steps import attention
from ...tracing.value import plain
from .layouts import largest
from .scope import Drop, Dropped

# Operations that do all of dropout in one call. Their arguments are the input,
# the share to drop, and whether the mode is train mode.
WHOLE = {
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout",
    "native_dropout",
}  # fmt: skip
KERNEL = "scaled_dot_product_attention"
BELOW, ABOVE = {"lt", "le"}, {"gt", "ge"}
UNIFORM = {"rand", "rand_like", "uniform"}
NAMED = re.compile(r"(?i)drop|bernoulli")  # names in code that suggest dropout
SHARE_DIGITS = 6  # decimal digits of a rounded share, so that 1 - 0.9 is 0.1
NUMBERS_KEPT = 2**24  # most entries of dropout's inputs to keep for a model


@dataclass(frozen=True, eq=False)
class Loss:
    """One call of dropout: its line, the share it drops, its sorted input."""

    place: Place
    share: float
    numbers: Tensor


class AtTheMean:
    """Replace the random zeros and ones of dropout by their mean.

    Use it as an observer of `operations_through`. It recognises operations
    such as `dropout`, and random masks. A mask is drawn, or made by comparing
    random numbers with a share. For another way to write dropout, add a rule
    to `__call__`: a method that returns an operation's result, or None if the
    rule does not apply.

    Attributes:
        losses: a record of each call that drops entries of a value.
        others: lines that draw random numbers for a purpose other than
            dropout.
        full: whether the inputs of dropout had too many entries to keep.
    """

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.others: list[Place] = []
        self.full = False
        self._room = NUMBERS_KEPT
        self._kept = WeakTensorKeyDictionary()  # the share that a mask keeps
        self._uniform = WeakTensorKeyDictionary()  # numbers drawn from 0 to 1

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, with means for its random zeros and ones."""
        name = base_name(func) if hasattr(func, "_schema") else name
        for rule in (self._whole, self._drawn, self._decided, self._used):
            answer = rule(func, name, args, kwargs)
            if answer is not None:
                return answer
        answer = func(*args, **kwargs)
        self._follow(func, name, args, kwargs, answer)
        return answer

    def _whole(self, func, name, args, kwargs) -> Any:
        """Return the answer of an operation such as `dropout`, or None."""
        given = arguments_of(func, args, kwargs)
        if name == KERNEL and given.get("dropout_p", 0.0) > 0:
            share = given.pop("dropout_p")
            *_, (_, weights) = attention(**given)
            self._note(weights, share, name)
            return func(**given)
        if name not in WHOLE:
            return None
        value, share = args[0], args[1]
        training = args[2] if len(args) > 2 else True
        if share > 0 and training:
            self._note(value, share, name)
        answer = value if func._schema.is_mutable else value.clone()
        if name == "native_dropout":
            return answer, torch.ones_like(value, dtype=torch.bool)
        return answer

    def _drawn(self, func, name, args, kwargs) -> Tensor | None:
        """Return the mean of a draw of zeros and ones."""
        if name != "bernoulli":
            return None
        written = func._schema.is_mutable
        given = args[1:] or args[:1]
        share = kwargs.get("p", given[0])
        if written and len(args) == 1 and "p" not in kwargs:
            share = 0.5
        mean = args[0] if written else args[0].clone()
        if isinstance(share, Tensor):
            mean.copy_(share)
            self._kept[mean] = float(share.double().mean())
        else:
            mean.fill_(share)
            self._kept[mean] = float(share)
        return mean

    def _decided(self, func, name, args, kwargs) -> Tensor | None:
        """Return a mask of ones if random numbers are compared to a share."""
        if name not in BELOW | ABOVE or len(args) != 2:
            return None
        drawn, share = args
        if not isinstance(drawn, Tensor) or drawn not in self._uniform:
            return None
        if isinstance(share, Tensor) and share.numel() != 1:
            return None
        kept = float(share) if name in BELOW else 1 - float(share)
        # a mask of ones, because `_used` handles the operation that applies it
        mask = torch.ones_like(drawn, dtype=torch.bool)
        self._kept[mask] = kept
        return mask

    def _used(self, func, name, args, kwargs) -> Tensor | None:
        """Return the answer of an operation on a random mask, or None."""
        if name in ("bitwise_not", "logical_not") and args[0] in self._kept:
            kept = 1 - self._kept[args[0]]
            opposite = torch.full_like(args[0], kept)  # all True if boolean
            self._kept[opposite] = kept
            return opposite
        if name == "where" and len(args) == 3 and args[0] in self._kept:
            return self._mixed(self._kept[args[0]], args[1:], name)
        if name == "masked_fill" and args[1] in self._kept:
            value, mask, filled = args
            answer = self._mixed(1 - self._kept[mask], (value, filled), name)
            return value.copy_(answer) if func._schema.is_mutable else answer
        if name == "mul" and len(args) == 2:
            return self._product(func, args[0], args[1], name)
        operands = tensors_in((*args, *kwargs.values()))
        masks = [t for t in operands if t.dtype == torch.bool]
        if len(operands) > 1 and any(mask in self._kept for mask in masks):
            raise ValueError(f"{name} uses a random mask")
        return None

    def _mixed(self, share: float, parts: Sequence[Any], name: str) -> Tensor:
        """Return the mean of the two values that a draw selects from.

        Also record the call in `losses`. `share` is the weight of the first
        value.
        """
        ours, theirs = parts
        numbers = [part for part in parts if isinstance(part, Tensor)]
        main = max(numbers, key=Tensor.numel)
        self._note(main, 1 - share if main is ours else share, name)
        return share * ours + (1 - share) * theirs

    def _product(
        self, func: Any, one: Any, other: Any, name: str
    ) -> Tensor | None:
        """Record a value that a random mask multiplies; return the product."""
        for mask, value in ((one, other), (other, one)):
            is_mask = isinstance(mask, Tensor) and mask in self._kept
            if not is_mask or not isinstance(value, Tensor) or not value.dim():
                continue
            if value in self._kept:
                return None
            kept = self._kept[mask]
            self._note(value, 1 - kept, name)
            if mask.dtype == torch.bool:
                return func(value, kept)
            return None
        return None

    def _follow(self, func, name, args, kwargs, answer) -> None:
        """Remember results that are computed only from a mask or a draw."""
        operands = tensors_in((*args, *kwargs.values()))
        answers = tensors_in((answer,))
        if name in UNIFORM:
            self._uniform.update(dict.fromkeys(answers, True))
        elif _draws(func) and name not in (KERNEL, *WHOLE):
            self.others.append(find_place(name))
        if len(operands) != 1:
            return
        for known in (self._kept, self._uniform):
            if operands[0] in known:
                known.update(dict.fromkeys(answers, known[operands[0]]))
        if operands[0] in self._kept and operands[0].dtype == torch.bool:
            for mask in answers:
                if mask.is_floating_point():
                    mask.fill_(self._kept[mask])

    def _note(self, value: Tensor, share: float, name: str) -> None:
        """Record a call that drops entries of a value."""
        self._room -= value.numel()
        self.full |= self._room < 0
        numbers = value.new_zeros(0) if self.full else value.detach()
        numbers = plain(numbers).flatten().sort().values
        place = find_place(name)
        self.losses.append(Loss(place, float(share), numbers))


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


# --- The dropout of one side only --------------------------------------------


def compare_losses(
    names: tuple[str, str],
    models: tuple[nn.Module, nn.Module],
    losses: tuple[Sequence[Loss], Sequence[Loss]],
    unit: float,
) -> Dropped | None:
    """Return the dropout that only one model has; None if both agree.

    Both agree if they drop the same share of the same entries, in one call or
    head by head. A difference is a fault if both models are copies of one
    implementation. They are copies if they come from one file, or if both use
    dropout and name their weights the same. In other models the authors may
    intend the difference. `unit` is the unit of rounding of both models.
    """
    near = max(DROPPED_SHARE, DROPPED_UNITS * unit)
    left, right = [*losses[0]], [*losses[1]]
    for loss in losses[0]:
        twin = next((b for b in right if _alike([loss], [b], near)), None)
        if twin is not None:
            left = [a for a in left if a is not loss]
            right = [b for b in right if b is not twin]
    for share in {loss.share for loss in (*left, *right)}:
        ours, theirs = _of_share(left, share), _of_share(right, share)
        if _alike(ours, theirs, near):
            left = [a for a in left if a not in ours]
            right = [b for b in right if b not in theirs]
    if not left and not right:
        return None
    without = (
        not losses[0] and not may_drop(models[0]),
        not losses[1] and not may_drop(models[1]),
    )
    names_alike = _names(models[0]) == _names(models[1])
    one_file = bool(_homes(models[0]) & _homes(models[1]))
    fault = one_file or (names_alike and all(losses))
    return Dropped(names, _by_line(left), _by_line(right), without, fault)


def _of_share(losses: Sequence[Loss], share: float) -> list[Loss]:
    """Return the calls that drop this share, up to float32's rounding."""
    digits = SHARE_DIGITS
    return [x for x in losses if round(x.share - share, digits) == 0]


def _alike(left: Sequence[Loss], right: Sequence[Loss], near: float) -> bool:
    """Return whether both models drop the same share of the same entries.

    Entries may differ by up to `near`, a share of the largest entry. They may
    also be scaled by the kept share, because the scores show whether that
    scale is right.
    """
    if not (left and right):
        return not left and not right
    shares = {round(loss.share, SHARE_DIGITS) for loss in (*left, *right)}
    ours, theirs = (
        torch.cat([loss.numbers for loss in side]).sort().values
        for side in (left, right)
    )
    if len(shares) > 1 or ours.numel() != theirs.numel():
        return False
    kept = 1 - shares.pop()
    size = max(largest(ours), largest(theirs))
    return any(
        largest(torch.nan_to_num(scale * ours - theirs)) <= near * size
        for scale in (1.0, kept, 1 / kept if kept else 1.0)
    )


def _by_line(losses: Sequence[Loss]) -> tuple[Drop, ...]:
    """Return one record of dropout for each line and share."""
    found: dict[tuple[Place, float], int] = {}
    for loss in losses:
        key = loss.place, loss.share
        found[key] = found.get(key, 0) + loss.numbers.numel()
    return tuple(Drop(*key, count) for key, count in found.items())


# --- Whether a difference is a fault -----------------------------------------


def may_drop(model: nn.Module) -> bool:
    """Return whether a module or a name in the code suggests dropout."""
    return any(
        NAMED.search(type(module).__name__) or NAMED.search(name)
        for module in model.modules()
        for name in ("", *_names_in_code(type(module)))
    )


def _names_in_code(kind: type) -> Iterator[str]:
    """Yield the names that the functions of a user's class refer to."""
    for each in kind.__mro__:
        if each.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for function in vars(each).values():
            if isinstance(function, FunctionType):
                yield from function.__code__.co_names


def _names(model: nn.Module) -> set[str]:
    """Return the names of a model's weights."""
    return {name for name, _ in model.named_parameters()}


def _homes(model: nn.Module) -> set[str]:
    """Return the files in which a model's forward methods are defined."""
    return {
        vars(each)["forward"].__code__.co_filename
        for each in type(model).__mro__
        if isinstance(vars(each).get("forward"), FunctionType)
        and each.__module__.split(".")[0] != "torch"
    }
