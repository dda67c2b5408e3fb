"""Rules for the codes of operations, by families; formulas of fused kernels.

An operation without a rule here is taken apart as torch's own table says, or
depends on everything that it is given.
"""

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .call import Call, rule
from .codes import (
    FREE,
    HIDDEN,
    KNOWN,
    STRONG,
    as_hidden,
    as_lowered,
    full,
    is_hidden,
    is_lowered,
    lined_up,
    lowest,
    over,
    plain,
    thin,
    united,
    where_known,
)

# --- Pointwise ---------------------------------------------------------------

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
    where = reduce(torch.logical_or, low)
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
    """Hidden numbers stay hidden unless they are raised."""
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
        zeros = call.zeros("other")
        shut = call.name == "mul" and bool(zero.all() or zeros.all())
        if shut and bool((codes > 0).any()):  # of more than a first token
            call.note("zeros", 0.0)  # no mask, but a gate
        zero = zero | zeros
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


@rule("where masked_fill", placed=True)
def choice(call: Call) -> Tensor:
    """A known condition selects; else all three count."""
    condition, yes, no = "condition", "self", "other"
    if call.name == "masked_fill":
        condition, yes, no = "mask", "value", "self"
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


@rule("exp exp2 sigmoid relu softplus", placed=True)
def vanishing(call: Call) -> Tensor:
    """Hidden numbers become a 0, which is known."""
    codes = call.codes("self")
    hidden = is_hidden(codes)
    if not bool(hidden.any()):
        return plain(codes)
    zero = united_all(call.out == 0, codes)
    return torch.where(hidden & zero, KNOWN, plain(codes))


rule("neg tanh abs pow rsub eq ne lt le gt ge complex polar", placed=True)(
    pointwise
)


@rule("native_dropout")
def dropout(call: Call) -> Tensor:
    """Random zeros, where no zero is known."""
    zero = call.zeros("input")
    return call.plain("input").clamp(min=FREE).masked_fill(zero, KNOWN)


# --- Movement ----------------------------------------------------------------


@rule("clone _to_copy _conj_physical detach_copy", placed=True)
def same(call: Call) -> Tensor:
    """Keep the codes, and what is hidden hidden.

    A wider dtype does not show that a number was the lowest of a narrow one.
    """
    codes, given = call.codes("self"), call["self"]
    if call.name != "_to_copy" or not (
        given.is_floating_point() and call.out.is_floating_point()
    ):
        return codes
    before, now = lowest(given.dtype), lowest(call.out.dtype)
    if now >= before or not bool((codes == KNOWN).any()):
        return codes
    values = call.value("self")
    low = where_known(codes, (values <= before) & values.isfinite())
    return torch.where(low, FREE + HIDDEN, codes)


@rule("copy _copy_from fill", placed=True, overwrites=True)
def copied(call: Call) -> Tensor:
    """Take the codes of the source."""
    codes = call.codes("value" if call.name == "fill" else "src")
    return lined_up(codes, call.out.dim())


@rule("cat", placed=True)
def joined(call: Call) -> Tensor:
    """Join along an axis; along others, one code serves if in all it does."""
    axis = call["dim"] % call.out.dim()
    parts = []
    for tensor in call["tensors"]:
        if tensor.shape != (0,):
            codes = call.of(tensor).movedim(axis, -1)
            parts.append(codes.expand(*codes.shape[:-1], tensor.size(axis)))
    parts = [p for p in parts if p.numel()] or parts[:1]
    common = np.broadcast_shapes(*(p.shape[:-1] for p in parts))
    parts = [p.expand(*common, -1) for p in parts]
    return torch.cat(parts, -1).movedim(-1, axis)


@rule("constant_pad_nd", placed=True)
def padded(call: Call) -> Tensor:
    """Pad with a known number."""
    codes, pad = call.codes("self"), call["pad"]
    kept = codes.dim() - len(pad) // 2
    codes = codes.expand(*codes.shape[:kept], *call["self"].shape[kept:])
    return torch.nn.functional.pad(codes, pad, value=KNOWN)


@rule(
    "roll flip repeat slice_scatter select_scatter diagonal_scatter "
    "_reshape_copy slice_copy select_copy split_copy",
    placed=True,
)
def moved(call: Call) -> Tensor | list[Tensor] | None:
    """Do the same to the codes."""
    args, kwargs = call.positional
    if "out" in kwargs:
        return None
    codes = [
        call.of(a).expand(a.shape) if isinstance(a, Tensor) else a
        for a in args
    ]
    found = call.func(*codes, **kwargs)
    return found if isinstance(found, Tensor) else list(found)


@rule(
    "new_zeros new_ones new_full zeros_like ones_like full_like zero "
    "rand_like randn_like randint_like uniform normal exponential random "
    "geometric log_normal cauchy rand randn randint randperm",
    overwrites=True,
)
def made(call: Call) -> Tensor:
    """Computed from nothing, or at random any number."""
    random = torch.Tag.nondeterministic_seeded in call.func.tags
    return full(FREE if random else KNOWN, call.out.dim(), call.device)


@rule("bernoulli multinomial")
def drawn(call: Call) -> Tensor:
    """Drawn by the probabilities in a tensor, if that is what it holds."""
    overwritten = call.func._schema.is_mutable and "out" not in call.args
    named = [n for n in call.tensors if not (overwritten and n == "self")]
    if overwritten:
        call.codes("self")
    free = full(FREE, call.out.dim(), call.device)
    codes = united(free, *map(call.plain, named))
    if call.name == "multinomial":
        codes = codes.amax(-1, keepdim=True)
    return codes


# --- Indexing ----------------------------------------------------------------

ROUTING = ("sort", "topk", "argmax", "max")
Ids = list[Tensor | None]  # of each axis, as x[i, :, j] has them
MASKS = (torch.bool, torch.uint8)


def _each_axis(call: Call, given: Ids) -> tuple[Ids, Ids]:
    """Return the index of each axis, and its codes; of a mask one for all."""
    ids: Ids = []
    of: Ids = []
    for one in given:
        found, codes = [one], [None if one is None else plain(call.of(one))]
        if one is not None and one.dtype in MASKS and one.dim():
            most = (
                plain(call.of(one)).amax() if one.numel() else full(KNOWN, 0)
            )
            found, codes = [*one.nonzero(as_tuple=True)], [most] * one.dim()
        ids, of = [*ids, *found], [*of, *codes]
    return ids, of


def _grid(ids: Tensor, axis: int, codes: Tensor) -> tuple[Ids, Ids]:
    """Return the same for ids along one axis, as gather takes them."""
    dims = ids.dim()
    each: Ids = [
        torch.arange(n, device=ids.device).view(-1, *(1,) * (dims - 1 - d))
        for d, n in enumerate(ids.shape)
    ]
    each[axis] = ids
    of: Ids = [full(KNOWN, 0, ids.device)] * dims
    of[axis] = codes
    return each, of


def _unknown(of: Ids) -> list[int]:
    """Return the axes whose ids are not known."""
    given = [(d, c) for d, c in enumerate(of) if c is not None and c.numel()]
    return [d for d, codes in given if int(codes.max()) > KNOWN]


def _laid(of: Ids, dims: int) -> Tensor:
    """Return the largest code of the ids, as they lie in the result."""
    axes = [d for d, codes in enumerate(of) if codes is not None]
    side_by_side = axes[-1] - axes[0] == len(axes) - 1
    behind = dims - (axes[-1] + 1 if side_by_side else len(axes))
    most = united(*(codes for codes in of if codes is not None))
    return most[(..., *(None,) * behind)]


def _read(codes: Tensor, shape: torch.Size, ids: Ids, of: Ids) -> Tensor:
    """Read by known ids what they choose; by others all along their axes."""
    unknown = _unknown(of)
    if unknown:
        codes = over(plain(codes), unknown)
    indexed = [d for d, one in enumerate(ids) if one is not None]
    sizes = [n if d in indexed else -1 for d, n in enumerate(shape)]
    found = torch.ops.aten.index(codes.expand(sizes), ids)
    return torch.maximum(found, _laid(of, len(shape))) if unknown else found


def _write(
    codes: Tensor,
    shape: torch.Size,
    ids: Ids,
    of: Ids,
    source: Tensor,
    adds: bool,
) -> Tensor:
    """Write by known ids where they say; by others all along their axes."""
    unknown, index_put = _unknown(of), torch.ops.aten.index_put
    sizes = [1 if d in unknown else n for d, n in enumerate(shape)]
    count = math.prod(sizes)
    places = torch.arange(count, device=codes.device).view(sizes)
    within = [
        one.clamp(0, 0) if one is not None and d in unknown else one
        for d, one in enumerate(ids)
    ]
    places = torch.ops.aten.index(places, within)
    if unknown or adds:
        codes, source = plain(codes), plain(source)
    else:
        nothing = full(KNOWN, 0, codes.device)
        codes = index_put(codes.expand(shape), ids, nothing)
        if bool(is_hidden(source).any() | is_hidden(codes).any()):
            return index_put(codes, ids, source.expand(places.shape))
    source = torch.maximum(source, _laid(of, len(shape)))
    written = codes.new_full((count,), KNOWN).scatter_reduce(
        0, places.flatten(), source.expand(places.shape).flatten(), "amax"
    )
    return torch.maximum(codes, written.view(sizes))


@rule("embedding index_select gather")
def selected(call: Call) -> Tensor:
    """Select along an axis."""
    name, axis, ids = "self", call.get("dim", default=0), call.get("index")
    if call.name == "embedding":
        name, ids = "weight", call["indices"]
    x, codes = call[name], call.codes(name)
    if x.dim() == 0:
        return call.everything()
    axis %= x.dim()
    if call.name == "gather":
        return _read(codes, x.shape, *_grid(ids, axis, plain(call.of(ids))))
    before = [None] * axis
    of = plain(call.of(ids))
    return _read(codes, x.shape, [*before, ids], [*before, of])


def _is_routed(call: Call, ids: list[Tensor | None]) -> bool:
    """Whether one mask says which rows an expert gets, and gives back.

    The proof then notes that rows are routed as in this text; each keeps its
    own codes.
    """
    mask, *more = ids
    rows = "values" not in call.args or call["values"].numel() > 1
    alone = not more and mask is not None and mask.dtype == torch.bool
    if call.routing and rows and alone:
        call.note("routed", 0)
    return call.routing and rows and alone


def _of_mask(call: Call, x: Tensor, mask: Tensor) -> Tensor:
    """Return the codes of a mask over the first axes, for each number."""
    codes = plain(call.of(mask))
    codes = codes[(..., *(None,) * (x.dim() - mask.dim()))]
    return codes.expand(x.shape)


@rule("index _unsafe_index")
def indexed(call: Call) -> Tensor:
    """Read by ids, as x[i, :, j] does."""
    x, given = call["self"], call["indices"]
    ids, of = _each_axis(call, given)
    if _unknown(of) and _is_routed(call, given):
        codes = torch.maximum(call.plain("self"), _of_mask(call, x, given[0]))
        return torch.ops.aten.index(codes.expand(x.shape), given)
    return _read(call.codes("self"), x.shape, ids, of)


@rule("index_put _unsafe_index_put _index_put_impl")
def put(call: Call) -> Tensor:
    """Write by ids, as x[i, :, j] = y does."""
    x, given = call["self"], call["indices"]
    ids, of = _each_axis(call, given)
    codes, source = call.codes("self"), call.codes("values")
    adds = call.get("accumulate", default=False)
    if _unknown(of) and _is_routed(call, given):
        mask, source = _of_mask(call, x, given[0]), plain(source)
        base = torch.maximum(plain(codes), mask)
        chosen = torch.ops.aten.index(base if adds else mask, given)
        return base.index_put(tuple(given), torch.maximum(chosen, source))
    if _unknown(of) and any(i is not None and i.dtype in MASKS for i in given):
        if len(given) > 1 or call["values"].numel() > 1:
            return call.everything()
        mask = _of_mask(call, x, given[0])  # as masked_fill does
        return united(plain(codes), plain(source).amax(), mask)
    return _write(codes, x.shape, ids, of, source, adds)


@rule(
    "scatter scatter_add scatter_reduce index_add index_copy index_fill "
    "index_reduce"
)
def scattered(call: Call) -> Tensor:
    """Write along one axis."""
    x, axis, ids = call["self"], call["dim"], call["index"]
    name = next(n for n in ("src", "source", "value") if n in call.args)
    codes, of, source = (
        call.codes("self"),
        call.plain("index"),
        call.codes(name),
    )
    if x.dim() == 0:
        return call.everything()
    axis %= x.dim()
    if call.name.startswith("index"):
        before = [None] * axis
        where = [*before, ids.reshape(-1)], [*before, of]
    else:
        where = _grid(ids, axis, of)
        if source.dim():
            source = source.expand(call[name].shape)
            source = source[tuple(map(slice, ids.shape))]
    replaces = call.name in ("scatter", "index_copy", "index_fill")
    adds = not replaces or call.get("reduce") is not None
    return _write(codes, x.shape, *where, source, adds)


@rule(
    "bincount histc histogram masked_scatter masked_select nonzero "
    "nonzero_static put take unique_consecutive unique_dim _unique _unique2"
)
def all_of_it(call: Call) -> Tensor:
    """Everything counts, but where a known mask keeps a number."""
    most = call.everything()
    if call.name == "masked_scatter" and call.known("mask"):
        return torch.where(call["mask"], most, call.codes("self"))
    return most


@rule("isin bucketize searchsorted")
def looked_up(call: Call) -> Tensor:
    """Depend on the number itself, where it is looked up in known ones."""
    number = "elements" if call.name == "isin" else "self"
    others = [name for name in call.tensors if name != number]
    if number in call.tensors and all(map(call.known, others)):
        return call.plain(number)
    return call.everything()


def integers_of_routing(call: Call) -> list[bool]:
    """Return which results say where a token goes, by what it is itself.

    An id that is chosen across tokens is none: the future may have a say.
    """
    integers = [
        not (o.is_floating_point() or o.is_complex() or o.dtype == torch.bool)
        for o in call.outs
    ]
    axis, own = call.get("dim"), False
    if call.name == "index":  # the token's own row of a table of ids
        own = call.known("self") and not call["self"].is_floating_point()
    elif call.name in ROUTING and isinstance(axis, int):
        codes = call.plain("self")
        most = codes.amax(axis, keepdim=True)
        own = bool(((codes == most) | (codes <= FREE)).all())
    return [own and integer for integer in integers]


# --- Mixing: reductions, products, softmax -----------------------------------

LARGEST = ("amax", "max", "argmax", "logsumexp")
AT_ONCE = 1 << 26  # codes of a product of three axes


def _axes(call: Call) -> list[int]:
    """Return the axes an operation reduces: all where none is given."""
    given, dims = call.get("dim"), call["self"].dim()
    if given is None or given == []:
        return list(range(dims))
    given = [given] if isinstance(given, int) else given
    return [axis % dims for axis in given] if dims else []


@rule(
    "sum mean prod nansum any all var std var_mean std_mean "
    "linalg_vector_norm norm count_nonzero amax max amin min aminmax argmax "
    "argmin logsumexp sort topk kthvalue median nanmedian mode _fft_r2c "
    "_fft_c2c _fft_c2r"
)
def reduced(call: Call) -> Tensor:
    """Depend on all along the axes, but what is hidden from a largest."""
    axes, codes = _axes(call), call.codes("self")
    if call.name in LARGEST and call["self"].is_floating_point():
        codes = visible(call, codes, call.hidden("self"), axes)
    codes = over(plain(codes), axes)
    if call.out.dim() == codes.dim():
        return codes
    return codes.reshape(
        [n for d, n in enumerate(codes.shape) if d not in axes]
    )


def visible(
    call: Call, codes: Tensor, hidden: Tensor, axes: list[int]
) -> Tensor:
    """Leave out what is hidden, unless all along the axes is.

    Where a token may lower all that is not, a finite number hides nothing.
    """
    if not bool(hidden.any()):
        return plain(codes)
    lowered = hidden | is_lowered(codes)
    finite = hidden & ~call.infinite("self")
    none = none_above(call, hidden, finite, axes)
    for axis in axes:
        lowered = lowered.all(axis, keepdim=True)
        finite = finite.any(axis, keepdim=True)
    if bool((lowered & finite & ~none).any()):
        call.note("padding", 0)
    return torch.where(hidden & ~none, KNOWN, plain(codes))


def none_above(
    call: Call, hidden: Tensor, finite: Tensor, axes: list[int]
) -> Tensor:
    """Return where a hidden number has none above it along the axes.

    A finite one hides only next to a number that is larger in this run: a
    token's own number may be the lowest of its dtype.
    """
    if bool(finite.any()):
        values = call.value("self")
        low = values <= lowest(values.dtype)
        for axis in axes:
            low = low.all(axis, keepdim=True)
        if bool(low.any()):
            hidden = hidden | low
    for axis in axes:
        hidden = hidden.all(axis, keepdim=True)
    return hidden


@rule("cumsum cumprod cummax cummin logcumsumexp _cummax_helper _logcumsumexp")
def running(call: Call) -> Tensor:
    """Depend on all earlier numbers along the axis."""
    x, axis = call["self"], call["dim"]
    return scan(call.plain("self"), axis, x.size(axis) if x.dim() else 0)


def scan(
    codes: Tensor, axis: int, size: int, backwards: bool = False
) -> Tensor:
    """Return the largest code up to each place along an axis."""
    if size == 0 or codes.size(axis) != size:
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
    zeros = call.zeros(first), call.zeros(second)
    shut = any(z.numel() and bool(z.all()) for z in zeros)
    if shut and bool((a > 0).any() | (b > 0).any()):
        call.note("zeros", 0.0)  # no mask, but a gate
    return multiply(a, b, *zeros)


@rule("mm bmm _int_mm _scaled_mm")
def matrices(call: Call) -> Tensor:
    """Depend on rows and columns where neither factor is a known 0."""
    scales = [n for n in call.tensors if n not in ("self", "mat2")]
    codes = _product(call, "self", "mat2")
    return united(codes, *(call.plain(name).max() for name in scales))


@rule("addmm baddbmm addbmm")
def added(call: Call) -> Tensor:
    """A product and a sum."""
    codes = _product(call, *[n for n in call.tensors if n != "self"])
    if call.name == "addbmm":
        codes = codes.amax(0)
    added_to = call.plain("self")
    if call["beta"] == 0:
        return codes
    codes = torch.maximum(codes, added_to)
    if not call.special or call["beta"] != 1:
        return codes
    return as_hidden(codes, call.hidden("self"))


@rule("avg_pool2d max_pool2d_with_indices")
def pooled(call: Call) -> Tensor:
    """Depend on the places under the window."""
    return torch.nn.functional.max_pool2d(
        call.plain("self").expand(call["self"].shape).float(),
        call["kernel_size"],
        call.get("stride") or None,
        call["padding"],
        call.get("dilation", default=1),
        call["ceil_mode"],
    )


@rule("_cdist_forward")
def distances(call: Call) -> Tensor:
    """Depend on a row of each."""
    first, second = (over(call.plain(name), -1) for name in ("x1", "x2"))
    return torch.maximum(first, second.mT)


# --- Softmax and norms ------------------------------------------------------


@rule("_softmax _safe_softmax _log_softmax", placed=True)
def softmax(call: Call) -> Tensor:
    """Hidden numbers get a known 0; the rest depends on the rest."""
    codes, axis = call.codes("self"), call["dim"]
    if call["self"].dim() == 0:
        return plain(codes)
    hidden = call.hidden("self")
    row = over(visible(call, codes, hidden, [axis]), axis)
    if not bool(hidden.any()):
        return row
    finite = hidden & ~call.infinite("self")
    hidden = hidden & ~none_above(call, hidden, finite, [axis])
    if call.name != "_log_softmax":
        return torch.where(hidden, KNOWN, row)
    own = torch.maximum(row, plain(codes))
    return as_hidden(torch.where(hidden, own, row), hidden)


@rule("nll_loss_forward nll_loss2d_forward")
def loss(call: Call) -> list[Tensor]:
    """Depend on a row's scores and target; the mean on all rows."""
    axis = 0 if call["self"].dim() == 1 else 1
    rows = over(call.plain("self"), axis).squeeze(axis)
    rows = united(rows, call.plain("target"))
    if call.get("weight") is not None:
        rows = united(rows, call.plain("weight").amax())
    return [rows if call["reduction"] == 0 else rows.amax(), rows.amax()]


@rule("native_layer_norm _fused_rms_norm", placed=True)
def normed(call: Call) -> list[Tensor]:
    """Depend on all features; weights are seldom known."""
    axes = list(range(-len(call["normalized_shape"]), 0))
    rows = over(call.plain("input"), axes)
    parts = [call.plain(n).amax() for n in call.tensors if n != "input"]
    return [united(rows, *parts) for _ in call.outs]


# --- Fused kernels -----------------------------------------------------------


@rule("mkldnn_rnn_layer _cudnn_rnn miopen_rnn")
def recurrent(call: Call) -> Tensor | list[Tensor]:
    """Depend on all earlier numbers in time, and the first state."""
    others = [call.plain(n).amax() for n in call.tensors if n != "input"]
    codes = united(over(call.plain("input"), -1), *others)
    if call.get("bidirectional"):
        return codes.amax()
    # the kernel of the CPU has its input turned already
    turned = call.name == "mkldnn_rnn_layer" or not call.get("batch_first")
    time, backwards = 0 if turned else 1, bool(call.get("reverse"))
    codes = scan(codes, time, call["input"].size(time), backwards)
    return [codes, *(codes.amax() for _ in call.outs[1:])]


@rule("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def cell(call: Call) -> Tensor:
    """One step of each row."""
    rows = [n for n in call.tensors if call[n].dim() > 1]
    return united(*(over(call.plain(n), -1) for n in rows)).clamp(min=FREE)


@rule(
    "linalg_matrix_exp linalg_cholesky_ex linalg_qr _linalg_svd _linalg_det "
    "_linalg_slogdet _linalg_eigh linalg_eig linalg_lu linalg_lu_factor_ex"
)
def of_a_matrix(call: Call) -> list[Tensor]:
    """Depend on all of the matrix, each on its own."""
    name = call.tensors[0]
    codes = over(call.plain(name), [-1, -2])[..., 0, 0]
    batch = call[name].dim() - 2
    return [codes[(..., *(None,) * (o.dim() - batch))] for o in call.outs]


@rule(
    "linalg_solve_triangular triangular_solve linalg_inv_ex _linalg_solve_ex"
)
def solved(call: Call) -> list[Tensor]:
    """A row depends on those before it, where a triangle of zeros says so.

    Each matrix is on its own; its inverse is solved for ones.
    """
    name = "A" if "A" in call.args else "self"
    size, left = call[name].size(-1), call.get("left", default=True)
    wide = (*call.codes(name).shape[:-2], size, size)
    matrix, zeros = call.plain(name).expand(wide), call.zeros(name)
    ones = torch.ones(size, size, dtype=torch.bool, device=matrix.device)
    above, below = ones.triu(1), ones.tril(-1)
    if "upper" in call.args:
        zeros = zeros | (below if call["upper"] else above)  # it is not read
    if call.get("transpose", default=False) == left:
        matrix, zeros = matrix.mT, zeros.mT
    rows = over(matrix.masked_fill(zeros, KNOWN), -1)
    inverse = call.name == "linalg_inv_ex"
    if not inverse:
        right = call.plain("B" if "B" in call.args else "self")
        if right.dim() < matrix.dim():
            return [call.everything() for _ in call.outs]
        rows = torch.maximum(rows, right if left else right.mT)
    if bool((zeros | ~above).all()):
        rows = scan(rows, -2, size)
    elif bool((zeros | ~below).all()):
        rows, above = scan(rows, -2, size, backwards=True), below
    else:
        rows, above = over(rows, -2), ~ones
    if inverse:
        rows = rows.expand(wide).masked_fill(above, KNOWN)
    rest = [call.everything() for _ in call.outs[1:]]
    return [rows if left else rows.mT, *rest]


# --- Formulas of fused kernels -----------------------------------------------

Arguments = Mapping[str, Any]


def attention(of: Arguments) -> Tensor:
    """Return softmax(q k^T scale + mask) v, as every kernel computes it."""
    query, key, value = of["query"], of["key"], of["value"]
    heads = query.size(-3) // key.size(-3)
    if heads > 1:
        key = key.repeat_interleave(heads, -3)
        value = value.repeat_interleave(heads, -3)
    scale = of.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(query.size(-1))
    scores = (query * scale) @ key.transpose(-2, -1)
    if of.get("is_causal"):
        # keys that are later; the first is aligned with the first query
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    mask = of.get("attn_mask")
    mask = of.get("attn_bias") if mask is None else mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def grouped_product(of: Arguments) -> Tensor | None:
    """Return rows times the matrix of their group, the groups in order."""
    x, weights, ends = of["self"], of["mat2"], of.get("offs")
    if ends is None or x.dim() != 2 or weights.dim() != 3:
        return None
    at = torch.arange(len(x), device=x.device)
    group = (at.unsqueeze(1) >= ends).sum(1).clamp(max=len(weights) - 1)
    return (x.unsqueeze(1) @ weights[group]).squeeze(1)


def convolution(of: Arguments) -> Tensor | None:
    """Return windows times the kernel; a transposed one moves in between."""
    x, w, groups = of.get("input", of.get("self")), of["weight"], of["groups"]
    space, sizes = x.dim() - 2, w.shape[2:]
    if space < 1 or x.dim() != w.dim():
        return None
    stride, dilation, padding, more = (
        [*of.get(name, [0])] * (space // len(of.get(name, [0])))
        for name in ("stride", "dilation", "padding", "output_padding")
    )
    reach = [d * (n - 1) for d, n in zip(dilation, sizes, strict=True)]
    sides = [(n, n) for n in padding]
    if of.get("transposed"):
        wide = [
            (n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)
        ]
        gaps = x.new_zeros(*x.shape[:2], *wide)
        gaps[(..., *(slice(None, None, n) for n in stride))] = x
        sides = [
            (r - p, r - p + m)
            for r, p, m in zip(reach, padding, more, strict=True)
        ]
        x, stride = gaps, [1] * space
        w = w.flip([*range(2, w.dim())]).unflatten(0, (groups, -1))
        w = w.transpose(1, 2).flatten(0, 1)
    pads = [n for side in reversed(sides) for n in side]
    x = torch.nn.functional.pad(x, pads)
    for axis in range(space):
        x = x.unfold(axis + 2, reach[axis] + 1, stride[axis])
        x = x[..., :: dilation[axis]]
    places = x.shape[2 : 2 + space]
    x = x.unflatten(1, (groups, -1)).movedim(2, -1 - space)
    x = x.flatten(-1 - space).flatten(2, -2)  # batch, groups, places, inner
    found = x @ w.flatten(1).unflatten(0, (groups, -1)).mT
    found = found.mT.flatten(1, 2).unflatten(-1, places)
    if of.get("bias") is None:
        return found
    return found + of["bias"].view(-1, *(1,) * space)


def stack(of: Arguments) -> Tensor:
    """Return tensors joined along a new axis."""
    return torch.cat(
        [t.unsqueeze(of["dim"]) for t in of["tensors"]], of["dim"]
    )


FORMULAS: dict[str, Callable[[Arguments], Tensor | None]] = {
    "stack": stack,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
        ),
        attention,
    ),
    **dict.fromkeys(
        (
            "convolution",
            "_convolution",
            "mkldnn_convolution",
            "cudnn_convolution",
        ),
        convolution,
    ),
    "_grouped_mm": grouped_product,
}
