"""Rules for the dependency codes of results; formulas of fused kernels.

If an operation has no rule here, torch's own table decomposes it, or its
result depends on all of its arguments. The decorator `rule` and its arguments
are in call.py. tests/proof/test_rules_on_samples.py tests each new rule
without further work.
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
    SIGN,
    STRONG,
    as_hidden,
    as_lowered,
    bounds_of,
    full,
    is_hidden,
    is_lowered,
    lined_up,
    lowest,
    over,
    plain,
    thin,
    united,
)

# --- Pointwise ---------------------------------------------------------------

SCALED = 1 / 64  # scores are divided by the root of a width up to 4096
LARGER = ("maximum", "fmax", "clamp", "clamp_min")
# functions that are infinite at some finite number, as a logarithm is at 0
POLES = (
    "log", "log2", "log10", "log1p", "xlogy", "special_xlog1py", "logit",
    "atanh", "erfinv", "lgamma", "digamma", "polygamma", "special_entr",
    "special_ndtri", "special_log_ndtr", "special_bessel_y0",
    "special_bessel_y1",
)  # fmt: skip


def pointwise(call: Call) -> Tensor:
    """Let the result depend on all operands."""
    codes = united(*(call.plain(name) for name in call.tensors))
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        codes = codes.clamp(min=FREE)
    if call.name in POLES:
        return as_lowered(codes)
    return _lowered(call, codes)


def _lowered(call: Call, codes: Tensor) -> Tensor:
    """Mark results as LOWERED if an operand is, or may be, very low.

    Sums with minus infinity are not marked: they are always minus infinity.
    """
    if not call.special or call.out.dtype == torch.bool:
        return codes
    low = [_may_lower(call, name) for name in call.terms]
    where = reduce(torch.logical_or, low)
    if not bool(where.any()):
        return codes
    if call.name in ("add", "sub"):
        sure = call.infinite("self")
        if call.name == "add" and call.get("alpha", default=1) == 1:
            sure = sure | call.infinite("other")
        where = where & ~sure
    return as_lowered(codes, where)


def _may_lower(call: Call, name: str) -> Tensor:
    """Return the places where an operand may make the result very low."""
    low = call.low(name)
    if call.name in LARGER and bool(low.any()):
        below = call.where(name, call.codes(name), lambda v: v < 0)
        # an upper bound lowers only below 0, a lower bound only from 0 on
        return low & (below if name == "max" else ~below)
    return low


@rule("add sub minimum fmin", placed=True)
def total(call: Call) -> Tensor:
    """Hide a sum or minimum if one operand counts as minus infinity."""
    a, b = "self", "other"
    codes = united(call.plain(a), call.plain(b))
    if not call.special:
        return codes
    if not call.out.is_floating_point():
        return _lowered(call, codes)
    hidden = call.hidden(a)
    if call.get("alpha", default=1) != 1:  # only -infinity surely stays low
        hidden = hidden & call.infinite(a)
    elif call.name == "sub":
        hidden = _not_raised(call, hidden, a, b, sign=-1)
        # minus plus infinity
        hidden = hidden | call.zeros(b, math.inf)
    else:
        second = call.hidden(b)
        if call.name == "add":
            hidden = _not_raised(call, hidden, a, b)
            second = _not_raised(call, second, b, a)
        hidden = hidden | second
    return as_hidden(_lowered(call, codes), hidden)


def _not_raised(
    call: Call, hidden: Tensor, name: str, by: str, sign: int = 1
) -> Tensor:
    """Return the hidden numbers of a sum that the other operand leaves low.

    If the other operand may be as large, a note says that no token or weight
    may make it so.
    """
    if not bool(hidden.any()):
        return hidden
    finite = hidden & ~call.infinite(name)
    other = call.codes(by)
    if not bool((finite & call.low(by)).any()):
        return hidden
    raised = finite & call.where(by, other, lambda v: v * sign >= -STRONG)
    if bool(raised.any()):
        least = max(STRONG, lowest(call.out.dtype))
        hidden = still_hidden(call, hidden, least, raised)
    lowered = is_lowered(other) | (is_hidden(other) & (sign < 0))
    if bool((finite & lowered).any()):
        call.note("padding", 0)
    return hidden


@rule("maximum fmax clamp clamp_min nan_to_num", placed=True)
def at_least(call: Call) -> Tensor:
    """Keep hidden numbers hidden, unless the operation raises them too far."""
    codes = united(*(call.plain(name) for name in call.tensors))
    if not call.special or not call.out.is_floating_point():
        return codes
    hidden = call.hidden("self")
    for name in ("other", "min"):
        if isinstance(call.get(name), Tensor):
            hidden = hidden & call.hidden(name)
    codes = _lowered(call, codes)
    if not bool(hidden.any()):
        return codes
    raised = call.result() > call.value("self")
    least = max(STRONG, lowest(call.out.dtype))
    still = still_hidden(call, hidden, least, raised)
    for name in ("other", "min"):  # a known number may replace a hidden one
        if call.get(name) is not None and not bool(still.any()):
            known = hidden & (call.codes(name) == KNOWN)
            codes = codes.masked_fill(known & united_all(raised, known), KNOWN)
    return as_hidden(codes, still)


def still_hidden(
    call: Call, hidden: Tensor, least: float, changed: Tensor | bool = True
) -> Tensor:
    """Return which hidden numbers are still low enough to be hidden.

    If a changed number is not its dtype's lowest, note the assumption that
    scores stay below it in size.
    """
    result = call.result()
    still = hidden & united_all(result <= least, hidden)
    above = still & (result > lowest(result.dtype)) & changed
    if bool(above.any()):
        call.note("masks", float(result.masked_fill(~above, -math.inf).max()))
    return still


def united_all(true: Tensor, like: Tensor) -> Tensor:
    """Return whether `true` holds for all numbers that share a code."""
    for axis in range(true.dim()):
        if axis < like.dim() and like.size(axis) == 1 < true.size(axis):
            true = true.all(axis, True)
    return true


@rule("mul div bitwise_and logical_and __and__", placed=True)
def product(call: Call) -> Tensor:
    """Let a known 0 give a known 0; let a positive factor keep -infinity.

    A known False counts as a 0.
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
        some = shut and bool((plain(codes) > 0).any())
        if some:  # some numbers that depend on tokens are multiplied by 0
            # the factor may be a gate, so the proof assumes that it stays 0
            call.note("zeros", 0.0)
        zero = zero | zeros
    hides = call.hides and call.out.is_floating_point()
    if hides and bool(is_hidden(a).any() | is_hidden(b).any()):
        pairs = [("self", "other"), ("other", "self")]
        for one, other in pairs[: 1 if call.name == "div" else 2]:
            if call.known(other) and bool((call.value(other) > 0).all()):
                hidden = is_hidden(call.codes(one))
                finite = hidden & ~call.infinite(one)
                if bool(finite.any()):
                    least = max(STRONG, lowest(call.out.dtype)) * SCALED
                    still = still_hidden(call, finite, least)
                    hidden = still | (hidden & ~finite)
                codes = as_hidden(codes, hidden)
    return codes.masked_fill(zero, KNOWN)


@rule("atan2 signbit copysign", placed=True)
def signed(call: Call) -> Tensor:
    """Let results that the sign of a known 0 decides depend on all tokens.

    A product with a mask may have made the 0.
    """
    codes = pointwise(call)
    name = "other" if call.name == "copysign" else "self"
    zero = call.zeros(name)
    if call.name == "atan2" and bool(zero.any()):
        above = (call.codes("other") == KNOWN) & (call.value("other") > 0)
        zero = zero & ~above
    if name not in call.tensors or not bool(zero.any()):
        return codes
    return codes.masked_fill(zero, SIGN)


# complex functions that jump at negative numbers
JUMPING = "angle sqrt rsqrt log log2 log10 pow acosh acos asin atanh"


@rule(JUMPING, placed=True)
def jumping(call: Call) -> Tensor:
    """As `signed`, for the imaginary parts of complex numbers."""
    codes, value = pointwise(call), call.args.get("self")
    if not isinstance(value, Tensor) or not value.is_complex():
        return codes
    jumps = call.value("self").imag == 0
    if call.name in ("angle", "sqrt", "rsqrt", "log", "log2", "log10", "pow"):
        jumps = jumps & (call.value("self").real <= 0)
    return torch.where(jumps, SIGN, codes) if bool(jumps.any()) else codes


@rule("bitwise_or logical_or __or__")
def either(call: Call) -> Tensor:
    """Let a known True make the result a known True."""
    codes = united(call.plain("self"), call.plain("other"))
    if call.out.dtype != torch.bool:
        return codes
    true = call.zeros("self", 1) | call.zeros("other", 1)
    return codes.masked_fill(true, KNOWN)


@rule("where masked_fill", placed=True)
def choice(call: Call) -> Tensor:
    """Select by a known condition; otherwise depend on all arguments."""
    condition, yes, no = "condition", "self", "other"
    if call.name == "masked_fill":
        condition, yes, no = "mask", "value", "self"
    of_condition = call.codes(condition)
    a, b = call.codes(yes), call.codes(no)
    both = united(of_condition, plain(a), plain(b))
    if call.out.dtype != torch.bool and int(of_condition.max()) > KNOWN:
        sure = call.infinite(yes) & call.infinite(no)
        both = as_lowered(both, (call.low(yes) | call.low(no)) & ~sure)
        both = as_hidden(both, call.hidden(yes) & call.hidden(no))
    if int(of_condition.max()) > KNOWN and int(of_condition.min()) > KNOWN:
        return both
    picked = torch.where(thin(call.value(condition)).bool(), a, b)
    return torch.where(of_condition == KNOWN, picked, both)


@rule("exp exp2 sigmoid relu softplus", placed=True)
def vanishing(call: Call) -> Tensor:
    """Turn hidden numbers into a known 0."""
    codes = call.codes("self")
    if not call.hides:
        return plain(codes)
    hidden, found = is_hidden(codes), plain(codes)
    if call.name == "softplus":  # a negative beta turns it around
        found = as_lowered(found, hidden | is_lowered(codes))
    if not bool(hidden.any()):
        return found
    zero = united_all(call.result() == 0, codes)
    return torch.where(hidden & zero, KNOWN, found)


rule("neg tanh abs pow rsub eq ne lt le gt ge complex polar", placed=True)(
    pointwise
)
rule("poisson _standard_gamma binomial")(pointwise)
rule(
    "fake_quantize_per_tensor_affine_cachemask "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
)(pointwise)


@rule("native_dropout")
def dropout(call: Call) -> Tensor:
    """Treat results as random, because dropout's zeros are not known."""
    zero = call.zeros("input")
    return call.plain("input").clamp(min=FREE).masked_fill(zero, KNOWN)


# --- Movement ----------------------------------------------------------------


@rule("clone _to_copy _conj_physical detach_copy", placed=True)
def same(call: Call) -> Tensor:
    """Keep the dependency codes; hidden numbers stay hidden.

    The lowest number of a narrow dtype stays hidden in a wider dtype.
    """
    codes, given = call.codes("self"), call["self"]
    if call.name != "_to_copy" or not (
        given.is_floating_point() and call.out.is_floating_point()
    ):
        return codes
    before, now = lowest(given.dtype), lowest(call.out.dtype)
    if now >= before or not bool((codes == KNOWN).any()):
        return codes
    low = call.where("self", codes, lambda v: (v <= before) & v.isfinite())
    return torch.where(low, FREE + HIDDEN, codes)


@rule("copy _copy_from fill", placed=True, overwrites=True)
def copied(call: Call) -> Tensor:
    """Return the dependency codes of the tensor or number that is copied."""
    codes = call.codes("value" if call.name == "fill" else "src")
    return lined_up(codes, call.out.dim())


@rule("cat", placed=True)
def joined(call: Call) -> Tensor:
    """Join codes along an axis; keep other axes at size 1 if possible."""
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
    """Pad with known numbers."""
    codes, pad = call.codes("self"), call["pad"]
    kept = codes.dim() - len(pad) // 2
    codes = codes.expand(*codes.shape[:kept], *call["self"].shape[kept:])
    return torch.nn.functional.pad(codes, pad, value=KNOWN)


@rule(
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d"
)
def between(call: Call) -> Tensor:
    """Let results depend on the numbers around their place in the input.

    The kernel rounds places, so a number may have a weight that is 0 in the
    formula.
    """
    given, out = call["self"], call.out
    codes = call.plain("self")
    axes = range(2, out.dim())
    scales = [call.get(n) for n in call.args if n.startswith("scales")]
    for axis, scale in zip(axes, scales, strict=True):
        if codes.size(axis) == 1:
            continue
        last, count = given.size(axis) - 1, out.size(axis)
        at = torch.arange(count, device=codes.device).double()
        linear = "align_corners" in call.args
        if linear and call["align_corners"]:
            at = at * (last / max(count - 1, 1))
        else:
            at = (at + 0.5) / (scale or count / (last + 1)) - 0.5 * linear
        first, end = (
            (at + by).floor().long().clamp(0, last)
            for by in (-0.01, linear + 0.01)
        )
        middle = (first + 1).minimum(end)
        codes = united(
            *(codes.index_select(axis, ids) for ids in (first, middle, end))
        )
    return codes


@rule("grid_sampler_2d grid_sampler_3d")
def sampled(call: Call) -> Tensor:
    """Let each result depend on its whole image: the kernel rounds places."""
    axes = [*range(2, call.out.dim())]
    grid = over(call.plain("grid"), -1).squeeze(-1).unsqueeze(1)
    return united(over(call.plain("input"), axes), grid)


@rule(
    "roll flip repeat slice_scatter select_scatter diagonal_scatter "
    "_reshape_copy slice_copy select_copy split_copy",
    placed=True,
)
def moved(call: Call) -> Tensor | list[Tensor] | None:
    """Apply the operation itself to the codes: it only moves numbers."""
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
    """Return codes of a new tensor; random numbers can have any value."""
    random = torch.Tag.nondeterministic_seeded in call.func.tags
    return full(FREE if random else KNOWN, call.out.dim(), call.device)


@rule("bernoulli multinomial")
def drawn(call: Call) -> Tensor:
    """Let draws depend on a tensor if it holds their probabilities."""
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
Ids = list[Tensor | None]  # ids of each axis, or None, as in x[i, :, j]
MASKS = (torch.bool, torch.uint8)


def _each_axis(call: Call, given: Ids) -> tuple[Ids, Ids]:
    """Return ids and codes for each axis; all axes of a mask share a code."""
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
    """Return ids and codes of all axes, given ids of one, as in gather."""
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
    """Return the largest code of the ids, in the shape of the result."""
    axes = [d for d, codes in enumerate(of) if codes is not None]
    side_by_side = axes[-1] - axes[0] == len(axes) - 1
    behind = dims - (axes[-1] + 1 if side_by_side else len(axes))
    most = united(*(codes for codes in of if codes is not None))
    return most[(..., *(None,) * behind)]


def _read(codes: Tensor, shape: torch.Size, ids: Ids, of: Ids) -> Tensor:
    """Index codes by known ids; take the largest along axes of unknown ids."""
    unknown = _unknown(of)
    if unknown:
        codes = over(plain(codes), unknown)
    if codes.numel() == 1:  # all numbers share one code, so ids do not matter
        codes = codes.reshape(())
        most = _laid(of, len(shape)) if unknown else codes
        return torch.maximum(codes, most)
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
    """Write codes at known ids; at every place along axes of unknown ids."""
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
        hides = bool(is_hidden(source).any() | is_hidden(codes).any())
        # with two values for a place, the order of memory decides
        if hides and places.numel() == places.unique().numel():
            return index_put(codes, ids, source.expand(places.shape))
    source = torch.maximum(plain(source), _laid(of, len(shape)))
    written = codes.new_full((count,), KNOWN).scatter_reduce(
        0, places.flatten(), source.expand(places.shape).flatten(), "amax"
    )
    return torch.maximum(codes, written.view(sizes))


@rule("_embedding_bag _embedding_bag_forward_only")
def bags(call: Call) -> list[Tensor] | None:
    """Let each result depend on the ids of its bag, and on the weights."""
    if not call.known("offsets"):
        return None
    size, ids = call["indices"].numel(), call.plain("indices")
    if call.get("per_sample_weights") is not None:
        ids = torch.maximum(ids, call.plain("per_sample_weights"))
    starts = call.value("offsets").tolist()
    ends = starts[1:] + [size] * (not call["include_last_offset"])
    ids, least = ids.expand(size), call.plain("weight").max()
    rows = [
        torch.cat([least[None], ids[start:end]]).amax()
        for start, end in zip(starts, ends, strict=False)
    ]
    every = call.everything()
    if not rows:
        return [every] * len(call.outs)
    codes = torch.stack(rows).unsqueeze(1)
    return [codes, *[every] * (len(call.outs) - 1)]


@rule("embedding index_select gather")
def selected(call: Call) -> Tensor:
    """Select along an axis, as the operation does."""
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
    """Return whether a mask selects the rows that are routed to an expert.

    If so, note the condition that rows are routed as in this text.
    """
    mask, *more = ids
    rows = "values" not in call.args or call["values"].numel() > 1
    alone = not more and mask is not None and mask.dtype == torch.bool
    if call.routing and rows and alone:
        call.note("routed", 0)
    return call.routing and rows and alone


def _of_mask(call: Call, x: Tensor, mask: Tensor) -> Tensor:
    """Return a mask's codes in the shape of x; masks cover the first axes."""
    codes = plain(call.of(mask))
    codes = codes[(..., *(None,) * (x.dim() - mask.dim()))]
    return codes.expand(x.shape)


@rule("index _unsafe_index")
def indexed(call: Call) -> Tensor:
    """Read by ids, as in x[i, :, j]."""
    x, given = call["self"], call["indices"]
    ids, of = _each_axis(call, given)
    if _unknown(of) and _is_routed(call, given):
        codes = torch.maximum(call.plain("self"), _of_mask(call, x, given[0]))
        return torch.ops.aten.index(codes.expand(x.shape), given)
    return _read(call.codes("self"), x.shape, ids, of)


@rule("index_put _unsafe_index_put _index_put_impl")
def put(call: Call) -> Tensor:
    """Write by ids, as in x[i, :, j] = y."""
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
        mask = _of_mask(call, x, given[0])  # the rule of masked_fill
        return united(plain(codes), plain(source).amax(), mask)
    return _write(codes, x.shape, ids, of, source, adds)


@rule(
    "scatter scatter_add scatter_reduce index_add index_copy index_fill "
    "index_reduce"
)
def scattered(call: Call) -> Tensor:
    """Write at ids along one axis, as scatter does."""
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
    """Let results depend on all arguments, unless a mask keeps a number."""
    most = call.everything()
    if call.name == "masked_scatter" and call.known("mask"):
        return torch.where(call["mask"], most, call.codes("self"))
    return most


@rule("isin bucketize searchsorted")
def looked_up(call: Call) -> Tensor:
    """Let a number looked up in a known table depend only on its index."""
    number = "elements" if call.name == "isin" else "self"
    others = [name for name in call.tensors if name != number]
    if number in call.tensors and all(map(call.known, others)):
        return call.plain(number)
    return call.everything()


def integers_of_routing(call: Call) -> list[bool]:
    """Return which results are integers that depend on a single token.

    By such integers a token chooses its route, for example to an expert. Ids
    from comparing tokens do not count, because later tokens may set them.
    """
    integers = [
        not (o.is_floating_point() or o.is_complex() or o.dtype == torch.bool)
        for o in call.outs
    ]
    axis, own = call.get("dim"), False
    if call.name == "index":  # a token's entry in a known table of integers
        own = call.known("self") and not call["self"].is_floating_point()
    elif call.name in ROUTING and isinstance(axis, int):
        codes = call.plain("self")
        most = codes.amax(axis, keepdim=True)
        own = bool(((codes == most) | (codes <= FREE)).all())
    return [own and integer for integer in integers]


# --- Mixing: reductions, products, softmax -----------------------------------

AT_ONCE = 1 << 26  # most codes in memory for one part of a matrix product


def _axes(call: Call) -> list[int]:
    """Return the axes that an operation reduces, by default all."""
    given, dims = call.get("dim"), call["self"].dim()
    if given is None or given == []:
        return list(range(dims))
    given = [given] if isinstance(given, int) else given
    return [axis % dims for axis in given] if dims else []


@rule(
    "sum mean prod nansum any all var std var_mean std_mean "
    "linalg_vector_norm norm count_nonzero amin min aminmax argmin sort topk "
    "kthvalue median nanmedian mode _fft_r2c _fft_c2c _fft_c2r"
)
def reduced(call: Call) -> Tensor:
    """Return the largest dependency codes along the reduced axes."""
    axes = _axes(call)
    return _without(call, over(call.plain("self"), axes), axes)


@rule("amax max argmax logsumexp", placed=True)
def largest(call: Call) -> list[Tensor]:
    """Return the largest codes of numbers that no mask hides.

    A result may be lowered if all numbers along the axes may be.
    """
    axes, codes = _axes(call), call.codes("self")
    low = None
    if call.special and call["self"].is_floating_point():
        hidden = call.hidden("self")
        low = hidden | call.low("self")
        for axis in axes:
            low = low.all(axis, keepdim=True)
        codes = visible(call, codes, hidden, axes)
    codes = over(plain(codes), axes)
    found = [codes] * len(call.outs)
    if low is not None:
        found[0] = as_lowered(codes, low)
    return [_without(call, each, axes) for each in found]


def _without(call: Call, codes: Tensor, axes: list[int]) -> Tensor:
    """Drop the reduced axes from codes, if the result lacks them."""
    if call.out.dim() == codes.dim():
        return codes
    return codes.reshape(
        [n for d, n in enumerate(codes.shape) if d not in axes]
    )


def visible(
    call: Call, codes: Tensor, hidden: Tensor, axes: list[int]
) -> Tensor:
    """Ignore hidden numbers, unless all numbers along the axes are hidden.

    If all visible numbers may be lowered, a finite mask may hide nothing. Then
    note the condition that some number stays above the mask. A mask of minus
    infinity makes such a row NaN.
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
    if bool((lowered & ~finite & ~none).any()):
        call.note("voids", 0)
    return torch.where(hidden & ~none, KNOWN, plain(codes))


def none_above(
    call: Call, hidden: Tensor, finite: Tensor, axes: list[int]
) -> Tensor:
    """Return where no number along the axes is larger than a hidden one.

    There a finite mask hides nothing, because all visible numbers may be the
    lowest of their dtype.
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
    """Let each result depend on the numbers up to its place along the axis."""
    x, axis = call["self"], call["dim"]
    return scan(call.plain("self"), axis, x.size(axis) if x.dim() else 0)


def scan(
    codes: Tensor, axis: int, size: int, backwards: bool = False
) -> Tensor:
    """Return the largest dependency code up to each place on an axis."""
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
    if not call.special:
        return torch.maximum(over(a, -1), over(b, -2))
    zeros = call.zeros(first), call.zeros(second)
    shut = any(z.numel() and bool(z.all()) for z in zeros)
    if shut and bool((a > 0).any() | (b > 0).any()):
        # the factor may be a gate, so the proof assumes that it stays 0
        call.note("zeros", 0.0)
    return multiply(a, b, *zeros)


@rule("mm bmm _int_mm _scaled_mm")
def matrices(call: Call) -> Tensor:
    """Let products depend on rows and columns, except for known zeros."""
    scales = [n for n in call.tensors if n not in ("self", "mat2")]
    codes = _product(call, "self", "mat2")
    return united(codes, *(call.plain(name).max() for name in scales))


@rule("addmm baddbmm addbmm", placed=True)
def added(call: Call) -> Tensor:
    """Return the codes of a sum: `self` plus a product of matrices."""
    first, second = (n for n in call.tensors if n != "self")
    codes = _product(call, first, second)
    if call.name == "addbmm":
        codes = codes.amax(0)
    added_to = call.plain("self")
    if call["beta"] != 0:
        codes = torch.maximum(codes, added_to)
    if not call.special or not call.out.is_floating_point():
        return codes
    low = over(call.low(first), -1) | over(call.low(second), -2)
    low = low.any(0) if call.name == "addbmm" else low
    low = low | call.low("alpha")
    hidden = torch.zeros_like(low)
    if call["beta"] == 1:
        hidden = call.hidden("self") & (call.infinite("self") | ~low)
        low = low | (call.low("self") & ~call.infinite("self"))
    elif call["beta"] != 0:
        low = low | call.low("self") | call.low("beta")
    return as_hidden(as_lowered(codes, low), hidden)


@rule("avg_pool2d max_pool2d_with_indices")
def pooled(call: Call) -> Tensor:
    """Let each pooled result depend on all numbers in its window."""
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
    """Let each distance depend on one row of each argument."""
    first, second = (over(call.plain(name), -1) for name in ("x1", "x2"))
    return torch.maximum(first, second.mT)


# --- Softmax and norms ------------------------------------------------------


@rule("_softmax _safe_softmax _log_softmax", placed=True)
def softmax(call: Call) -> Tensor:
    """Turn hidden numbers into 0; let visible ones depend on each other."""
    codes, axis = call.codes("self"), call["dim"]
    if call["self"].dim() == 0:
        return plain(codes)
    if not call.special:
        return over(codes, axis)
    hidden = call.hidden("self")
    row = over(visible(call, codes, hidden, [axis]), axis)
    if call.name == "_log_softmax":  # what is lowered stays as low
        row = as_lowered(row, is_lowered(codes))
    if not bool(hidden.any()):
        return row
    finite = hidden & ~call.infinite("self")
    hidden = hidden & ~none_above(call, hidden, finite, [axis])
    if call.name != "_log_softmax":
        return torch.where(hidden, KNOWN, row)
    own = torch.maximum(plain(row), plain(codes))
    return as_hidden(torch.where(hidden, own, row), hidden)


@rule("nll_loss_forward nll_loss2d_forward")
def loss(call: Call) -> list[Tensor]:
    """Let a row's loss depend on that row, and a mean loss on all rows."""
    axis = 0 if call["self"].dim() == 1 else 1
    rows = over(call.plain("self"), axis).squeeze(axis)
    rows = united(rows, call.plain("target"))
    if call.get("weight") is not None:
        rows = united(rows, call.plain("weight").amax())
    return [rows if call["reduction"] == 0 else rows.amax(), rows.amax()]


@rule("native_layer_norm _fused_rms_norm", placed=True)
def normed(call: Call) -> list[Tensor]:
    """Let normalised numbers depend on all features and the norm's weights."""
    axes = list(range(-len(call["normalized_shape"]), 0))
    rows = over(call.plain("input"), axes)
    parts = [call.plain(n).amax() for n in call.tensors if n != "input"]
    return [united(rows, *parts)] * len(call.outs)


# --- Fused kernels -----------------------------------------------------------


@rule("mkldnn_rnn_layer _cudnn_rnn miopen_rnn")
def recurrent(call: Call) -> Tensor | list[Tensor]:
    """Let results depend on all times up to theirs, and on the first state."""
    others = [call.plain(n).amax() for n in call.tensors if n != "input"]
    codes = united(over(call.plain("input"), -1), *others)
    if call.get("bidirectional"):
        return codes.amax()
    # the CPU kernel always gets (time, batch)
    turned = call.name == "mkldnn_rnn_layer" or not call.get("batch_first")
    time, backwards = 0 if turned else 1, bool(call.get("reverse"))
    codes = scan(codes, time, call["input"].size(time), backwards)
    return [codes, *(codes.amax() for _ in call.outs[1:])]


@rule("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def cell(call: Call) -> Tensor:
    """Let one step of a recurrent cell keep rows independent."""
    rows = [n for n in call.tensors if call[n].dim() > 1]
    return united(*(over(call.plain(n), -1) for n in rows)).clamp(min=FREE)


@rule(
    "linalg_matrix_exp linalg_cholesky_ex linalg_qr _linalg_svd _linalg_det "
    "_linalg_slogdet _linalg_eigh linalg_eig linalg_lu linalg_lu_factor_ex"
)
def of_a_matrix(call: Call) -> list[Tensor]:
    """Let results depend on their whole matrix, but on no other matrix."""
    name = call.tensors[0]
    codes = over(call.plain(name), [-1, -2])[..., 0, 0]
    if call.name == "_linalg_slogdet":  # minus infinity if it is singular
        codes = as_lowered(codes)
    batch = call[name].dim() - 2
    return [codes[(..., *(None,) * (o.dim() - batch))] for o in call.outs]


@rule("linalg_inv_ex _linalg_solve_ex")
def eliminated(call: Call) -> list[Tensor]:
    """Let results depend on a whole matrix, and on one column of `B`.

    Known zeros are ignored, because pivots reorder the rows of the matrix. The
    matrices of a batch are independent.
    """
    codes = over(call.plain("A"), [-1, -2])
    if "B" in call.args:
        right = call.plain("B")
        if right.dim() < codes.dim():
            return [call.everything() for _ in call.outs]
        axis = -2 if call.get("left", default=True) else -1
        codes = torch.maximum(codes, over(right, axis))
    rest = [call.everything() for _ in call.outs[1:]]
    return [codes, *rest]


@rule("linalg_solve_triangular triangular_solve")
def solved(call: Call) -> list[Tensor]:
    """Let a row of the solution depend only on rows that are solved earlier.

    The matrices of a batch are independent.
    """
    name = "A" if "A" in call.args else "self"
    size, left = call[name].size(-1), call.get("left", default=True)
    wide = (*call.codes(name).shape[:-2], size, size)
    matrix, zeros = call.plain(name).expand(wide), call.zeros(name)
    ones = torch.ones(size, size, dtype=torch.bool, device=matrix.device)
    above, below = ones.triu(1), ones.tril(-1)
    # the solver does not read this triangle
    zeros = zeros | (below if call["upper"] else above)
    if call.get("transpose", default=False) == left:
        matrix, zeros = matrix.mT, zeros.mT
    rows = over(matrix.masked_fill(zeros, KNOWN), -1)
    right = call.plain("B" if "B" in call.args else "self")
    if right.dim() < matrix.dim():
        return [call.everything() for _ in call.outs]
    rows = torch.maximum(rows, right if left else right.mT)
    if bool((zeros | ~above).all()):
        rows = scan(rows, -2, size)
    else:
        rows = scan(rows, -2, size, backwards=True)
    rest = [call.everything() for _ in call.outs[1:]]
    return [rows if left else rows.mT, *rest]


SDPA = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)


@rule(" ".join(SDPA), placed=True)
def attended(call: Call) -> list[Tensor] | None:
    """Let a result depend on its query, and on the keys that it may see.

    With a mask, known numbers or grouped heads, return None: use the formula.
    """
    names = ("query", "key", "value")
    mask = call.get("attn_mask", default=call.get("attn_bias"))
    (*q, time, _), (*k, size, _), _ = (call[n].shape for n in names)
    causal = bool(call.get("is_causal"))
    shifted = causal and time != size
    if mask is not None or call.hides or q != k or shifted:
        return None
    query, key, value = map(call.codes, names)
    if min(bounds_of(codes)[0] for codes in (query, key, value)) == KNOWN:
        return None
    keys = united(over(key, -1), value)
    keys = scan(keys, -2, size) if causal else over(keys, -2)
    codes = united(over(query, -1), keys)
    return [codes, *(codes.amax() for _ in call.outs[1:])]


# --- Formulas of fused kernels -----------------------------------------------

Arguments = Mapping[str, Any]


def attention(of: Arguments) -> Tensor:
    """Return softmax(q k^T scale + mask) v, which every kernel computes."""
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
        # hide the keys after each query; query 0 is aligned with key 0
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
    """Multiply the rows of each group by the group's own matrix."""
    x, weights, ends = of["self"], of["mat2"], of.get("offs")
    if ends is None or x.dim() != 2 or weights.dim() != 3:
        return None
    at = torch.arange(len(x), device=x.device)
    group = (at.unsqueeze(1) >= ends).sum(1).clamp(max=len(weights) - 1)
    return (x.unsqueeze(1) @ weights[group]).squeeze(1)


def convolution(of: Arguments) -> Tensor | None:
    """Multiply windows by the kernel; if transposed, first insert zeros."""
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
    # x: (batch, groups, places, inner)
    x = x.flatten(-1 - space).flatten(2, -2)
    found = x @ w.flatten(1).unflatten(0, (groups, -1)).mT
    found = found.mT.flatten(1, 2).unflatten(-1, places)
    if of.get("bias") is None:
        return found
    return found + of["bias"].view(-1, *(1,) * space)


def three_factors(of: Arguments) -> Tensor:
    """Multiply three tensors, each with some new axes; sum over axes."""
    product = torch.ones((), dtype=of["i1"].dtype, device=of["i1"].device)
    for number in "123":
        factor = of[f"i{number}"]
        for axis in of[f"expand{number}"]:
            factor = factor.unsqueeze(axis)
        product = product * factor
    return product.sum(of["sumdim"])


def stack(of: Arguments) -> Tensor:
    """Return tensors joined along a new axis."""
    return torch.cat(
        [t.unsqueeze(of["dim"]) for t in of["tensors"]], of["dim"]
    )


FORMULAS: dict[str, Callable[[Arguments], Tensor | None]] = {
    "stack": stack,
    **dict.fromkeys(SDPA, attention),
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
    "_trilinear": three_factors,
}
