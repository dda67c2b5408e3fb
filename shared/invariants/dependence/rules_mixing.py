"""Rules of what mixes numbers along axes: sums, products, softmax, norms."""

import itertools
import math
from typing import Any

import numpy as np  # torch.broadcast_shapes imports sympy: half a second
import torch
from torch import Tensor

from .call import Call, rule
from .lattice import (
    CODES,
    HIDDEN,
    KNOWN,
    as_hidden,
    full,
    is_hidden,
    is_lowered,
    lined_up,
    over,
    plain,
    united,
)

AT_ONCE = 1 << 26  # codes of a product of three axes


def _axes(call: Call, *names: str) -> list[int]:
    """Return the axes an operation reduces: all where none is given."""
    given: Any = None
    for name in names or ("dim",):
        if not isinstance(call.get(name), bool):
            given = call.get(name) if given is None else given
    dims = call["self"].dim()
    if given is None or given == []:
        return list(range(dims))
    given = [given] if isinstance(given, int) else given
    return [axis % dims for axis in given] if dims else []


def _kept(call: Call, codes: Tensor, axes: list[int]) -> Tensor:
    """Drop reduced axes, of size 1, where the result has dropped them."""
    if call.out.dim() < codes.dim():
        rest = [n for i, n in enumerate(codes.shape) if i not in axes]
        return codes.reshape(rest)
    return codes


@rule(
    "sum mean prod nansum any all var std var_mean std_mean "
    "linalg_vector_norm norm count_nonzero"
)
def reduced(call: Call) -> Tensor:
    """Depend on all along the axes."""
    axes = _axes(call)
    return _kept(call, over(call.plain("self"), axes), axes)


@rule("amax max amin min aminmax argmax argmin logsumexp")
def extreme(call: Call) -> Tensor:
    """Depend on all along the axes but what is hidden from a largest."""
    if "other" in call.args:
        return united(call.plain("self"), call.plain("other"))
    axes = _axes(call)
    codes = call.codes("self")
    hidden = is_hidden(codes)
    if call.name in ("amin", "min", "aminmax", "argmin"):
        codes = plain(codes)
    elif call["self"].is_floating_point():
        hidden = call.hidden("self")
        codes = visible(call, codes, hidden, axes)
    return _kept(call, over(codes, axes), axes)


def visible(
    call: Call, codes: Tensor, hidden: Tensor, axes: list[int] | int
) -> Tensor:
    """Leave out what is hidden, unless all along the axes is.

    Where a token may lower all that is not, a finite number hides nothing.
    """
    axes = [axes] if isinstance(axes, int) else axes
    if not bool(hidden.any()):
        return plain(codes)
    none, lowered = hidden, hidden | is_lowered(codes)
    finite = hidden & ~call.infinite("self")
    for axis in axes:
        none = none.all(axis, keepdim=True)
        lowered = lowered.all(axis, keepdim=True)
        finite = finite.any(axis, keepdim=True)
    if bool((lowered & finite & ~none).any()):
        call.note("padding", 0)
    return torch.where(hidden & ~none, KNOWN, plain(codes))


@rule("cumsum cumprod cummax cummin logcumsumexp _cummax_helper _logcumsumexp")
def running(call: Call) -> Tensor:
    """Depend on what stands before along the axis."""
    if call["self"].dim() == 0:
        return call.plain("self")
    return scan(
        call.plain("self"), call["dim"], call["self"].size(call["dim"])
    )


def scan(
    codes: Tensor, axis: int, size: int, backwards: bool = False
) -> Tensor:
    """Return the largest code up to each place along an axis."""
    if codes.size(axis) != size or size == 0:
        return codes
    codes = codes.flip(axis) if backwards else codes
    codes = codes.cummax(axis).values
    return codes.flip(axis) if backwards else codes


# --- Products ---------------------------------------------------------------


def multiply(a: Tensor, b: Tensor, za: Tensor, zb: Tensor) -> Tensor:
    """Return the codes of a @ b, where za and zb are the known zeros."""
    if not bool(za.any()) and not bool(zb.any()):
        return torch.maximum(over(a, -1), over(b, -2))
    a, za = torch.broadcast_tensors(a, za)
    b, zb = torch.broadcast_tensors(b, zb)
    if b.size(-1) == 1 or a.size(-2) == 1:  # one column, or one row, for all
        row = b.size(-1) == 1
        both = torch.maximum(a, b.mT)
        both = both.masked_fill(za | zb.mT, KNOWN)
        return over(both, -1) if row else over(both, -1).mT
    inner = max(a.size(-1), b.size(-2))
    a, za = (x.expand(*x.shape[:-1], inner) for x in (a, za))
    b, zb = (x.expand(*x.shape[:-2], inner, x.size(-1)) for x in (b, zb))
    parts = []
    lead = math.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    step = max(1, AT_ONCE // max(1, lead * inner * b.size(-1)))
    for one, zeros in zip(a.split(step, -2), za.split(step, -2), strict=True):
        both = torch.maximum(one.unsqueeze(-1), b.unsqueeze(-3))
        zero = zeros.unsqueeze(-1) | zb.unsqueeze(-3)
        parts.append(both.masked_fill(zero, KNOWN).amax(-2))
    return torch.cat(parts, -2)


def _product(call: Call, first: str, second: str) -> Tensor:
    a, b = call.plain(first), call.plain(second)
    za, zb = call.zeros(first), call.zeros(second)
    if call[second].dim() == 1:
        return multiply(a, b.unsqueeze(-1), za, zb.unsqueeze(-1)).squeeze(-1)
    return multiply(a, b, za, zb)


@rule("mm bmm _int_mm _scaled_mm")
def matrices(call: Call) -> Tensor:
    """Depend on rows and columns where neither factor is a known 0."""
    second = "mat2" if "mat2" in call.args else "other"
    codes = _product(call, "self", second)
    for name in set(call.tensors) - {"self", second}:
        codes = torch.maximum(codes, call.plain(name).max())
    return codes


@rule("mv")
def matrix_and_vector(call: Call) -> Tensor:
    """The same, with one column."""
    return _product(call, "self", "vec")


@rule("dot vdot")
def vectors(call: Call) -> Tensor:
    """The same, with one row and one column."""
    a, b = call.plain("self"), call.plain("tensor")
    zero = call.zeros("self") | call.zeros("tensor")
    return torch.maximum(a, b).masked_fill(zero, KNOWN).amax()


@rule("addmm baddbmm addmv addbmm")
def added(call: Call) -> Tensor:
    """A product and a sum."""
    names = [n for n in call.tensors if n != "self"]
    codes = _product(call, *names[:2])
    if call.name == "addbmm":
        codes = codes.amax(0)
    added_to = call.plain("self")
    if call["beta"] == 0:
        return codes
    codes = torch.maximum(codes, added_to)
    if not call.special or call["beta"] != 1:
        return codes
    return as_hidden(codes, call.hidden("self"))


@rule("linear")
def linear(call: Call) -> Tensor:
    """A product with the transposed weight."""
    weight, zeros = call.plain("weight"), call.zeros("weight")
    first = "input" if "input" in call.args else "self"
    codes = multiply(call.plain(first), weight.mT, call.zeros(first), zeros.mT)
    if call.get("bias") is None:
        return codes
    return torch.maximum(codes, call.plain("bias"))


@rule("convolution _convolution mkldnn_convolution cudnn_convolution")
def convolution(call: Call) -> Tensor | None:
    """Depend on the places under the kernel, where it is no known 0."""
    x, w = call["input" if "input" in call.args else "self"], call["weight"]
    codes = plain(call.of(x))
    space = x.dim() - 2
    if call.get("transposed") or space < 1 or x.dim() != w.dim():
        return None
    codes = codes.expand(*codes.shape[:2], *x.shape[2:])
    groups = call["groups"]
    if codes.size(1) > 1 and groups > 1:
        codes = codes.unflatten(1, (groups, -1)).amax(2)
    else:
        codes = codes.amax(1, keepdim=True)
    pad = [n for n in reversed(_each(call["padding"], space)) for _ in (0, 1)]
    codes = torch.nn.functional.pad(codes, pad, value=KNOWN)
    of_weight = call.plain("weight").amax()
    zero = call.zeros("weight")
    zero = lined_up(zero, w.dim())
    stride = _each(call["stride"], space)
    dilation = _each(call["dilation"], space)
    found: Tensor | None = None
    for tap in itertools.product(*(range(n) for n in w.shape[2:])):
        part, empty = codes, zero
        for axis, at in enumerate(tap):
            start = at * dilation[axis]
            size = (call.out.size(axis + 2) - 1) * stride[axis] + 1
            part = part.narrow(axis + 2, start, size)
            part = part[
                (slice(None),) * (axis + 2)
                + (slice(None, None, stride[axis]),)
            ]
            lean = empty.size(axis + 2) == 1
            empty = empty.narrow(axis + 2, 0 if lean else at, 1)
        if bool(empty.all()):
            continue
        found = part if found is None else torch.maximum(found, part)
    if found is None:
        return full(KNOWN, x.dim(), x.device)
    if found.size(1) > 1:
        found = found.repeat_interleave(call.out.size(1) // groups, 1)
    found = torch.maximum(found, of_weight.to(CODES))
    if call.get("bias") is not None:
        found = torch.maximum(found, call.plain("bias").amax())
    return found


def _each(value: Any, count: int) -> list[int]:
    values = list(value)
    return values * count if len(values) == 1 else values


@rule("avg_pool2d max_pool2d_with_indices")
def pooled(call: Call) -> Tensor:
    """Depend on the places under the window."""
    x = call["self"]
    codes = call.plain("self").expand(x.shape).float()
    window, stride = call["kernel_size"], call.get("stride")
    more = {n: call.get(n, default=1) for n in ("padding", "dilation")}
    more["padding"] = call.get("padding", default=0)
    return torch.nn.functional.max_pool2d(
        codes, window, stride or None, ceil_mode=call["ceil_mode"], **more
    )


@rule("_cdist_forward")
def distances(call: Call) -> Tensor:
    """Depend on a row of each."""
    first, second = (over(call.plain(name), -1) for name in ("x1", "x2"))
    return torch.maximum(first, second.mT)


# --- Softmax and norms ------------------------------------------------------


@rule("_softmax _safe_softmax _log_softmax softmax log_softmax", placed=True)
def softmax(call: Call) -> Tensor:
    """What is hidden gets a known 0; the rest depends on the rest."""
    codes, axis = call.codes("self"), call["dim"]
    if call["self"].dim() == 0:
        return plain(codes)
    hidden = call.hidden("self")
    row = over(visible(call, codes, hidden, axis), axis)
    if not bool(hidden.any()):
        return row
    none = hidden.all(axis, keepdim=True)
    if call.name in ("_log_softmax", "log_softmax"):
        own = torch.maximum(row, plain(codes))
        raised = torch.where(own > KNOWN, own + HIDDEN, own)
        return torch.where(hidden & ~none, raised, row)
    zero = hidden & ~none
    return torch.where(zero, KNOWN, row)


@rule("nll_loss_forward nll_loss2d_forward")
def loss(call: Call) -> list[Tensor]:
    """Depend on a row's scores and target; the mean on all rows."""
    axis = 0 if call["self"].dim() == 1 else 1
    rows = over(call.plain("self"), axis).squeeze(axis)
    rows = united(rows, call.plain("target"))
    if call.get("weight") is not None:
        rows = united(rows, call.plain("weight").amax())
    return [rows if call["reduction"] == 0 else rows.amax(), rows.amax()]


@rule("native_layer_norm _fused_rms_norm rms_norm layer_norm", placed=True)
def normed(call: Call) -> Tensor | list[Tensor]:
    """Depend on all features; weights are seldom known."""
    codes = call.plain("input")
    axes = list(range(-len(call["normalized_shape"]), 0))
    codes = over(codes, axes)
    for name in ("weight", "bias"):
        if call.get(name) is not None:
            codes = torch.maximum(codes, call.plain(name).amax())
    lean = codes.expand(
        *codes.shape[: codes.dim() - len(axes)], *(1 for _ in axes)
    )
    return [lean for _ in call.outs]


@rule("_fft_r2c _fft_c2c _fft_c2r")
def transformed(call: Call) -> Tensor:
    """Everything along the axes."""
    return over(call.plain("self"), [d for d in call["dim"]])
