"""Rules of what is computed number by number."""

import torch
from torch import Tensor

from .call import Call, rule
from .lattice import (
    FREE,
    KNOWN,
    STRONG,
    as_hidden,
    as_lowered,
    is_hidden,
    lowest,
    plain,
    thin,
    united,
)

# Of minus infinity they make 0.
VANISHING = "exp exp2 sigmoid relu softplus"
LOGARITHMS = ("log", "log2", "log10", "log1p")  # of 0


def pointwise(call: Call) -> Tensor:
    """Depend on all operands."""
    codes = united(*(call.plain(name) for name in call.tensors))
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        codes = codes.clamp(min=FREE)
    if call.name in LOGARITHMS:
        return as_lowered(codes, codes > FREE)
    return _lowered(call, codes)


def _lowered(call: Call, codes: Tensor) -> Tensor:
    """Mark what a token may have made low: with a low operand.

    A sum with minus infinity is that for sure.
    """
    if not call.special or not call.out.is_floating_point():
        return codes
    names = [n for n in ("self", "other") if n in call.args]
    low = [call.low(n) for n in {*names, *call.tensors}]
    where = low[0]
    for more in low[1:]:
        where = where | more
    if not bool(where.any()):
        return codes
    if call.name == "add":
        sure = call.infinite("self") | call.infinite("other")
        where = where & ~sure
    return as_lowered(codes, where)


@rule("add sub minimum fmin", placed=True)
def total(call: Call) -> Tensor:
    """A sum with minus infinity is minus infinity: that hides the rest."""
    a, b = "self", "other"
    codes = united(call.plain(a), call.plain(b))
    if not call.special or not call.out.is_floating_point():
        return codes
    hidden = call.hidden(a)
    if call.name != "sub" and call.get("alpha", default=1) == 1:
        hidden = hidden | call.hidden(b)
    return as_hidden(_lowered(call, codes), hidden)


@rule("maximum fmax clamp clamp_min nan_to_num", placed=True)
def at_least(call: Call) -> Tensor:
    """What is hidden stays hidden unless it is raised."""
    codes = united(*(call.plain(name) for name in call.tensors))
    if not call.out.is_floating_point():
        return codes
    hidden = call.hidden("self")
    for name in ("other", "min"):
        if isinstance(call.get(name), Tensor):
            hidden = hidden & call.hidden(name)
    codes = _lowered(call, codes)
    if not bool(hidden.any()):
        return codes
    still = call.out <= max(STRONG, lowest(call.out.dtype))
    return as_hidden(codes, hidden & united_all(still, hidden))


def united_all(true: Tensor, like: Tensor) -> Tensor:
    """Return whether all numbers that share a code are true."""
    for axis in range(true.dim()):
        if axis < like.dim() and like.size(axis) == 1 < true.size(axis):
            true = true.all(axis, True)
    return true


@rule("mul div bitwise_and logical_and __and__", placed=True)
def product(call: Call) -> Tensor:
    """A known 0 makes a known 0; a known positive factor keeps minus infinity.

    False is 0.
    """
    codes = united(call.plain("self"), call.plain("other"))
    if not call.special:
        return codes
    codes = _lowered(call, codes)
    a, b = call.codes("self"), call.codes("other")
    zero = call.zeros("self")
    if call.name != "div":
        zero = zero | call.zeros("other")
    if call.hides and bool(is_hidden(a).any() | is_hidden(b).any()):
        pairs = [("self", "other"), ("other", "self")]
        for one, other in pairs[: 1 if call.name == "div" else 2]:
            if call.known(other) and bool((call.value(other) > 0).all()):
                codes = as_hidden(codes, is_hidden(call.codes(one)))
    return codes.masked_fill(zero, KNOWN)


@rule("bitwise_or logical_or __or__")
def either(call: Call) -> Tensor:
    """A known True makes a known True."""
    codes = united(call.plain("self"), call.plain("other"))
    if call.out.dtype != torch.bool:
        return codes
    true = call.zeros("self", 1) | call.zeros("other", 1)
    return codes.masked_fill(true, KNOWN)


@rule("where", placed=True)
def choice(call: Call) -> Tensor:
    """A known condition selects; else all three count."""
    return _choose(call, "condition", "self", "other")


@rule("masked_fill", placed=True)
def filled(call: Call) -> Tensor:
    """The same, with the condition first."""
    return _choose(call, "mask", "value", "self")


def _choose(call: Call, condition: str, yes: str, no: str) -> Tensor:
    of_condition = call.codes(condition)
    a, b = call.codes(yes), call.codes(no)
    both = united(of_condition, plain(a), plain(b))
    if call.out.is_floating_point() and int(of_condition.max()) > KNOWN:
        sure = call.infinite(yes) & call.infinite(no)
        both = as_lowered(both, (call.low(yes) | call.low(no)) & ~sure)
        both = as_hidden(both, call.hidden(yes) & call.hidden(no))
    if int(of_condition.max()) > KNOWN and int(of_condition.min()) > KNOWN:
        return both
    picked = torch.where(thin(call.value(condition)).bool(), a, b)
    return torch.where(of_condition == KNOWN, picked, both)


@rule(VANISHING, placed=True)
def vanishing(call: Call) -> Tensor:
    """What is hidden becomes a 0, which is known."""
    codes = call.codes("self")
    hidden = is_hidden(codes)
    if not bool(hidden.any()):
        return plain(codes)
    zero = united_all(call.out == 0, codes)
    return torch.where(hidden & zero, KNOWN, plain(codes))


@rule("neg tanh abs pow rsub eq ne lt le gt ge complex polar", placed=True)
def ordinary(call: Call) -> Tensor:
    """Depend on all operands."""
    return pointwise(call)


@rule("tril triu", placed=True)
def triangle(call: Call) -> Tensor:
    """Zeros are put in, and known."""
    codes = call.codes("self")
    shape = (*codes.shape[:-2], *call.out.shape[-2:])
    ones = torch.ones(shape[-2:], dtype=torch.bool, device=codes.device)
    kept = getattr(ones, call.name)(call["diagonal"])
    return torch.where(kept, codes.expand(shape), KNOWN)


@rule("native_dropout")
def dropout(call: Call) -> Tensor:
    """Random zeros, where no zero is known."""
    zero = call.zeros("input")
    return call.plain("input").clamp(min=FREE).masked_fill(zero, KNOWN)
