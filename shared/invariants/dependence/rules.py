"""What each operation does to codes, by families; and fused kernels' formulas.

An operation without a rule here is taken apart as torch's own table says, or
depends on everything that it is given.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .call import Call, rule
from .codes import (
    CODES,
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
        zeros = call.zeros("other")
        shut = call.name == "mul" and bool(zero.all() or zeros.all())
        if shut and bool((codes > 0).any()):  # of more than a first token
            call.note("zero", 0.0)  # no mask, but a gate
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


# --- Movement ----------------------------------------------------------------


@rule(
    "clone _to_copy detach alias lift_fresh lift contiguous view_copy "
    "resolve_conj resolve_neg _conj_physical positive detach_copy "
    "alias_copy",
    placed=True,
)
def same(call: Call) -> Tensor:
    """Keep the codes, and what is hidden hidden.

    A wider dtype does not show that a number was the lowest of its own.
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


@rule("copy _copy_from", placed=True, overwrites=True)
def copied(call: Call) -> Tensor:
    """Take the codes of the source."""
    return call.codes("src")


@rule("cat stack", placed=True)
def joined(call: Call) -> Tensor:
    """Join along an axis; along others, one code serves if in all it does."""
    tensors = [t for t in call["tensors"] if t.shape != (0,)]
    axis = call["dim"] % call.out.dim()
    parts = []
    for tensor in tensors:
        codes = call.of(tensor)
        if call.name == "stack":
            codes = codes.unsqueeze(axis)
            parts.append(codes)
        else:
            shape = list(codes.shape)
            shape[axis] = tensor.size(axis)
            parts.append(codes.expand(shape))
    parts = [p for p in parts if p.numel()] or parts[:1]
    common = np.broadcast_shapes(
        *(p.narrow(axis, 0, min(1, p.size(axis))).shape for p in parts)
    )
    return torch.cat(
        [
            p.expand(*common[:axis], p.size(axis), *common[axis + 1 :])
            for p in parts
        ],
        axis,
    )


@rule("constant_pad_nd", placed=True)
def padded(call: Call) -> Tensor:
    """Pad with a known number."""
    return _acted(call, len(call["pad"]) // 2, call["pad"], KNOWN)


def _acted(call: Call, axes: int, *rest: object) -> Tensor:
    """Do the same to the codes, expanded over the last axes."""
    codes = call.codes("self")
    keep = codes.dim() - axes
    shape = (*codes.shape[:keep], *call["self"].shape[keep:])
    return call.func(codes.expand(shape), *rest)


@rule("index_select")
def selected(call: Call) -> Tensor:
    """Select by known ids; else all along the axis may be chosen."""
    codes, axis = call.codes("self"), call["dim"]
    if call["self"].dim() == 0:
        return codes
    if not call.known("index"):
        ids = call.plain("index").amax()
        return torch.maximum(plain(codes).amax(axis, keepdim=True), ids)
    if codes.size(axis) == 1:
        return codes
    return codes.index_select(axis, call["index"])


MOVES = (
    "roll flip repeat repeat_interleave expand_copy rot90 _unsafe_view "
    "_reshape_copy slice_scatter select_scatter as_strided_scatter "
    "diagonal_scatter unfold_copy permute_copy transpose_copy t_copy "
    "squeeze_copy unsqueeze_copy slice_copy select_copy split_copy "
    "unbind_copy as_strided reflection_pad1d replication_pad1d "
    "reflection_pad2d replication_pad2d channel_shuffle pixel_shuffle "
    "diag_embed unsafe_split unsafe_split_with_sizes split_with_sizes_copy "
    "pixel_unshuffle unsafe_chunk _reshape_alias unbind split "
    "split_with_sizes diagonal_copy "
)
THROUGH_FLOAT = (
    "reflection_pad1d",
    "replication_pad1d",
    "reflection_pad2d",
    "replication_pad2d",
)


@rule(MOVES, placed=True)
def moved(call: Call) -> Tensor | list[Tensor] | None:
    """Do the same to the codes."""
    if call.name == "_unsafe_view":
        from .codes import Shadow

        given = call["self"]
        if given.is_contiguous():
            codes = call.codes("self")
            shadow = Shadow(given.size(), given.stride(), codes, 1, 0, 0)
            return shadow.view(call.out)
    repeats = call.get("repeats")
    if isinstance(repeats, Tensor) and not call.known("repeats"):
        return None
    args, kwargs = call.positional
    func = call.func
    if "out" in kwargs:  # fully_shard has operations of its own
        func = getattr(torch.ops.aten, call.name).default
        kwargs = {n: value for n, value in kwargs.items() if n != "out"}
    first, *rest = args
    result = func(
        _expanded(call, first),
        *(_expanded(call, r) if _is_source(call, r) else r for r in rest),
        **kwargs,
    )
    if isinstance(result, list | tuple):
        return [r.to(torch.int16) for r in result]
    return result.to(torch.int16)


def _is_source(call: Call, value: object) -> bool:
    return isinstance(value, Tensor) and value is call.get("src")


def _expanded(call: Call, value: Tensor) -> Tensor:
    codes = call.of(value).expand(value.shape)
    if call.name.startswith("as_strided"):  # it counts by the strides
        laid = torch.empty_strided(
            value.shape, value.stride(), dtype=codes.dtype, device=codes.device
        )
        return laid.copy_(codes)
    return codes.float() if call.name in THROUGH_FLOAT else codes


FACTORIES = (
    "zeros ones full arange empty eye linspace new_zeros new_ones new_empty "
    "new_full zeros_like ones_like full_like empty_like scalar_tensor zero "
    "empty_strided new_empty_strided tril_indices triu_indices logspace "
    "hann_window empty_permuted range _efficientzerotensor "
)
RANDOM = (
    "rand randn rand_like randn_like randint randint_like randperm uniform "
    "normal exponential random geometric log_normal cauchy "
)


@rule(FACTORIES, overwrites=True)
def known(call: Call) -> Tensor:
    """Computed from nothing."""
    return full(KNOWN, call.out.dim(), call.device)


@rule("fill", overwrites=True)
def filled_with(call: Call) -> Tensor:
    """Take the code of the number."""
    return lined_up(call.codes("value"), call.out.dim())


@rule(RANDOM, overwrites=True)
def random(call: Call) -> Tensor:
    """Can be any number."""
    return full(FREE, call.out.dim(), call.device)


@rule("bernoulli multinomial")
def drawn(call: Call) -> Tensor:
    """Drawn by the probabilities in a tensor, if that is what it holds."""
    if call.func._schema.is_mutable and "out" not in call.args:
        call.codes("self")  # it is overwritten
        others = [call.plain(n) for n in call.tensors if n != "self"]
        codes = full(FREE, call.out.dim(), call.device)
        for other in others:
            codes = torch.maximum(codes, other)
        return codes
    codes = call.plain("self").clamp(min=FREE)
    if call.name == "multinomial":
        codes = codes.amax(-1, keepdim=True)
    return codes


# --- Indexing ----------------------------------------------------------------

ROUTING = ("sort", "topk", "argsort", "argmax", "max")


@rule("embedding")
def embedding(call: Call) -> Tensor:
    """A row of the table: by known ids its own, else any."""
    table, ids = call.codes("weight"), call.plain("indices").unsqueeze(-1)
    if table.size(0) > 1 and call.known("indices"):
        return table[call["indices"]]
    return torch.maximum(plain(table).amax(0), ids)


@rule("gather")
def gathered(call: Call) -> Tensor:
    """By known ids what they choose, else all along the axis."""
    x, axis, ids = call["self"], call["dim"], call["index"]
    codes = call.codes("self")
    if call.known("index"):
        return codes.expand(x.shape).gather(axis, ids)
    codes = over(plain(codes), axis)
    if x.dim():
        codes = codes.expand(
            [1 if d == axis % x.dim() else n for d, n in enumerate(x.shape)]
        )
        cut = tuple(
            slice(None) if d == axis % x.dim() else slice(n)
            for d, n in enumerate(ids.shape)
        )
        codes = codes[cut]
    return torch.maximum(codes, call.plain("index"))


def _spread(call: Call, ids: list[Tensor | None]) -> tuple[list[int], bool]:
    """Return the axes that ids index, and whether all ids are known."""
    axes: list[int] = []
    at = 0
    for one in ids:
        width = 1
        if one is not None:
            width = one.dim() if one.dtype == torch.bool else 1
            axes += range(at, at + width)
        at += width
    known = all(
        int(call.of(one).max()) == KNOWN
        for one in ids
        if one is not None and one.numel()
    )
    return axes, known


def _is_routed(call: Call, ids: list[Tensor | None]) -> bool:
    """Whether one mask says which rows an expert gets, and gives back.

    The proof then notes that rows are routed as in this text; each keeps its
    own codes.
    """
    mask, one = ids[0], len(ids) == 1
    if not (call.routing and one and mask is not None):
        return False
    rows = "values" not in call.args or call["values"].numel() > 1
    routed = rows and mask.dtype == torch.bool
    if routed:
        call.note("routed", 0)
    return routed


def _of_mask(call: Call, x: Tensor, mask: Tensor) -> Tensor:
    """Return the codes of a mask over the first axes, for each number."""
    codes = plain(call.of(mask))
    codes = codes[(..., *(None,) * (x.dim() - mask.dim()))]
    return codes.expand(x.shape)


@rule("index _unsafe_index")
def indexed(call: Call) -> Tensor:
    """Read by ids, as x[i, :, j] does."""
    x, ids = call["self"], call["indices"]
    axes, known = _spread(call, ids)
    codes = call.codes("self")
    if known:
        return torch.ops.aten.index(codes.expand(x.shape), ids)
    given = [i for i in ids if i is not None]
    if _is_routed(call, ids):
        rows = torch.ops.aten.index(plain(codes).expand(x.shape), ids)
        chosen = torch.ops.aten.index(_of_mask(call, x, given[0]), ids)
        return torch.maximum(rows, chosen)
    largest = over(plain(codes), axes).expand(x.shape)
    result = torch.ops.aten.index(largest, ids)
    if any(i.dtype == torch.bool for i in given):
        of_ids = torch.stack([plain(call.of(i)).max() for i in given]).max()
        return torch.maximum(result, of_ids)
    own = plain(call.of(given[0]))
    for i in given[1:]:
        own = torch.maximum(own, plain(call.of(i)))
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    together = max(i.dim() for i in given)
    own = own[(None,) * (together - own.dim())]
    tail = result.dim() - first - together
    return torch.maximum(result, own[(..., *(None,) * tail)])


@rule("index_put _unsafe_index_put _index_put_impl")
def put(call: Call) -> Tensor:
    """Write by known ids; by others anywhere along their axes."""
    x, ids = call["self"], call["indices"]
    _, known = _spread(call, ids)
    base, source = call.plain("self").expand(x.shape), call.plain("values")
    if known:
        places = torch.arange(x.numel(), device=x.device).view(x.shape)
        at = torch.ops.aten.index(places, ids)
        if not call.get("accumulate", default=False):
            base = torch.ops.aten.index_put(
                call.codes("self").expand(x.shape),
                ids,
                torch.tensor(KNOWN, dtype=CODES, device=x.device),
            )
            raw = call.codes("values").expand(at.shape)
            if bool(is_hidden(raw).any() | is_hidden(base).any()):
                return base.index_put(tuple(_full(ids)), raw)
        flat, source = base.flatten(), source.expand(at.shape).flatten()
        flat = flat.scatter_reduce(0, at.flatten(), source, "amax")
        return flat.view(base.shape)
    given = [i for i in ids if i is not None]
    if _is_routed(call, ids):
        mask = _of_mask(call, x, given[0])
        base = torch.maximum(base, mask)
        added = call.get("accumulate", default=False)
        chosen = torch.ops.aten.index(base if added else mask, ids)
        return base.index_put(tuple(ids), torch.maximum(chosen, source))
    alone = len(ids) == 1 and call["values"].numel() == 1
    if alone and given[0].dtype == torch.bool:  # as masked_fill does
        mask = plain(call.of(given[0]))
        mask = mask[(..., *(None,) * (x.dim() - given[0].dim()))]
        return united(base, source.amax(), mask)
    most = torch.stack(
        [plain(call.of(i)).max() for i in given if i.numel()] + [source.max()]
    ).max()
    return torch.maximum(base, most)


def _full(ids: list[Tensor | None]) -> list[Any]:
    return [slice(None) if i is None else i for i in ids]


@rule(
    "scatter scatter_add scatter_reduce index_add index_copy index_fill "
    "index_reduce"
)
def scattered(call: Call) -> Tensor:
    """The same along one axis."""
    x, axis, ids = call["self"], call["dim"], call["index"]
    source_name = next(n for n in ("src", "source", "value") if n in call.args)
    base = call.codes("self").expand(x.shape)
    source = call.codes(source_name)
    if x.dim() == 0:
        return call.everything()
    axis %= x.dim()
    by_row = call.name.startswith("index")
    if by_row:
        shape = [*x.shape]
        shape[axis] = ids.numel()
        ids = ids.reshape(
            [-1 if d == axis else 1 for d in range(x.dim())]
        ).expand(shape)
        of_ids = call.plain("index").reshape(-1)
        of_ids = of_ids.reshape(
            [-1 if d == axis else 1 for d in range(x.dim())]
        )
    else:
        of_ids = call.plain("index")
    source = source.expand(
        call[source_name].shape if source.dim() else ids.shape
    )
    source = source[tuple(slice(n) for n in ids.shape)]
    replaces = call.name in ("scatter", "index_copy", "index_fill")
    replaces &= call.get("reduce") is None
    if call.known("index"):
        if replaces:
            return base.scatter(axis, ids, source)
        return plain(base).scatter_reduce(axis, ids, plain(source), "amax")
    new = torch.maximum(plain(source), of_ids).amax(axis, keepdim=True)
    if new.shape != tuple(
        1 if d == axis else n for d, n in enumerate(x.shape)
    ):
        new = new.amax()
    return torch.maximum(plain(base), new)


@rule("masked_scatter put take masked_select")
def anywhere(call: Call) -> Tensor:
    """All of everything, but that a known mask keeps its own."""
    most = call.everything()
    if call.name == "masked_scatter" and call.known("mask"):
        return torch.where(call["mask"], most, call.codes("self"))
    return most


@rule("sort topk argsort kthvalue median nanmedian mode")
def ordered(call: Call) -> Tensor:
    """Depend on all along the axis but what is hidden, which comes last."""
    codes = call.codes("self")
    dims = call["self"].dim()
    if dims == 0:
        return plain(codes)
    if call.get("dim") is None and call.name in ("median", "nanmedian"):
        return plain(codes).amax()
    axis = call["dim"]
    hidden = call.hidden("self") if codes.numel() else is_hidden(codes)
    exact = not bool(is_hidden(codes).any())
    if exact and call["self"].is_floating_point():
        codes = visible(call, codes, hidden, axis)
    codes = over(plain(codes), axis)
    if call.out.dim() < dims:
        codes = codes.squeeze(axis)
    return codes


@rule(
    "histc bincount unique_dim _unique2 "
    "unique_consecutive nonzero nonzero_static _unique equal is_nonzero "
    "_local_scalar_dense histogram _assert_async "
    "_assert_tensor_metadata"
)
def all_of_it(call: Call) -> Tensor:
    """Everything counts."""
    return call.everything()


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
    if call.name == "index":  # the token's own row of a table of ids
        table = call["self"]
        own = call.known("self") and not table.is_floating_point()
        return [own and integer for integer in integers]
    axis = call.get("dim")
    if call.name not in ROUTING or not isinstance(axis, int):
        return [False] * len(integers)
    codes = call.plain("self")
    most = codes.amax(axis, keepdim=True)
    alike = ((codes == most) | (codes <= FREE)).all()
    return [bool(alike) and integer for integer in integers]


# --- Mixing: reductions, products, softmax -----------------------------------

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


def _with_gaps(codes: Tensor, steps: list[int]) -> Tensor:
    """Put known zeros between the places of each axis in space."""
    sizes = [
        (n - 1) * step + 1
        for n, step in zip(codes.shape[2:], steps, strict=True)
    ]
    wide = codes.new_full((*codes.shape[:2], *sizes), KNOWN)
    places = tuple(slice(None, None, step) for step in steps)
    wide[(slice(None), slice(None), *places)] = codes
    return wide


@rule("convolution _convolution mkldnn_convolution cudnn_convolution")
def convolution(call: Call) -> Tensor | None:
    """Depend on the places under the kernel, where it is no known 0."""
    x, w = call["input" if "input" in call.args else "self"], call["weight"]
    codes = plain(call.of(x))
    space = x.dim() - 2
    if space < 1 or x.dim() != w.dim():
        return None
    codes = codes.expand(*codes.shape[:2], *x.shape[2:])
    groups = call["groups"]
    if codes.size(1) > 1 and groups > 1:
        codes = codes.unflatten(1, (groups, -1)).amax(2)
    else:
        codes = codes.amax(1, keepdim=True)
    stride = _each(call["stride"], space)
    dilation = _each(call["dilation"], space)
    sides = [(n, n) for n in _each(call["padding"], space)]
    of_weight = call.plain("weight").amax()
    zero = call.zeros("weight")
    zero = lined_up(zero, w.dim())
    if call.get("transposed"):  # a convolution of x with zeros in between
        codes = _with_gaps(codes, stride)
        more = _each(call["output_padding"], space)
        for axis, (pad, _) in enumerate(sides):
            reach = dilation[axis] * (w.size(axis + 2) - 1) - pad
            sides[axis] = reach, reach + more[axis]
        stride = [1] * space
        zero = zero.flip([*range(2, w.dim())])
    pads = [n for pair in reversed(sides) for n in pair]
    codes = torch.nn.functional.pad(codes, pads, value=KNOWN)
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


# --- Fused kernels -----------------------------------------------------------


@rule("mkldnn_rnn_layer _cudnn_rnn miopen_rnn")
def recurrent(call: Call) -> Tensor | list[Tensor]:
    """Depend on what stands before in time, and the first state."""
    x = call["input"]
    # the kernel of the CPU has its input turned already
    turned = call.name == "mkldnn_rnn_layer" or not call.get("batch_first")
    time = 0 if turned else 1
    codes = over(call.plain("input"), -1)
    for name in call.tensors:
        if name != "input":
            codes = torch.maximum(codes, call.plain(name).amax())
    if call.get("bidirectional") or (call.get("num_layers") or 1) < 1:
        return codes.amax()
    codes = scan(codes, time, x.size(time), bool(call.get("reverse")))
    if x.dim() != call.outs[0].dim():
        return codes.amax()
    rest = [codes.amax() for _ in call.outs[1:]]
    return [codes, *rest]


@rule("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def cell(call: Call) -> Tensor:
    """One step of each row."""
    names = [n for n in call.tensors if call[n].dim() > 1]
    codes = [over(call.plain(n), -1) for n in names]
    most = codes[0]
    for one in codes[1:]:
        most = torch.maximum(most, one)
    return most.clamp(min=-1)


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


@rule("linalg_solve_triangular triangular_solve")
def triangular(call: Call) -> Tensor | list[Tensor]:
    """A row depends on the rows that are solved before it."""
    a, b = ("self", "B") if "B" in call.args else ("A", "self")
    left = call.get("left", default=True)
    upper = bool(call["upper"]) ^ bool(call.get("transpose", default=False))
    found = _solved(call, a, b, upper, left, call["upper"])
    return [found, call.plain(a)][: len(call.outs)]


def _solved(
    call: Call, a: str, b: str, upper: bool, left: bool, stored: bool
) -> Tensor:
    size = call[a].size(-1)
    matrix = call.plain(a).expand(*call.plain(a).shape[:-2], size, size)
    cut = torch.ones(size, size, dtype=torch.bool, device=matrix.device)
    cut = cut.triu() if stored else cut.tril()
    matrix = matrix.masked_fill(~cut, -2)
    matrix = matrix.mT if upper != stored else matrix
    solved = call.plain(b)
    solved = solved if left else solved.mT
    matrix = matrix if left else matrix.mT
    backwards = upper if left else not upper
    rows = torch.maximum(over(matrix, -1), solved)
    rows = scan(rows, -2, size, backwards)
    return rows if left else rows.mT


@rule("linalg_inv_ex inverse linalg_solve_ex _linalg_solve_ex linalg_lu_solve")
def solved(call: Call) -> Tensor | list[Tensor]:
    """The same where a known triangle of zeros says so; else everything."""
    name = "self" if "self" in call.args else "A"
    zeros = call.zeros(name)
    size = call[name].size(-1)
    zeros = zeros.expand(*zeros.shape[:-2], size, size)
    above = torch.ones(size, size, dtype=torch.bool, device=zeros.device)
    matrix = call.plain(name)
    matrix = matrix.expand(*matrix.shape[:-2], size, size)
    free = [call.everything() for _ in call.outs[1:]]
    for upper, empty in ((False, above.triu(1)), (True, above.tril(-1))):
        if not bool((zeros | ~empty).all()):
            continue
        rows = over(matrix.masked_fill(empty, -2), -1)
        if "inv" in call.name:
            codes = scan(rows, -2, size, upper)
            codes = codes.expand(*codes.shape[:-2], size, size)
            return [codes.masked_fill(empty, -2), *free]
        if call["B"].dim() < call[name].dim() or not call["left"]:
            return [call.everything(), *free]
        rows = torch.maximum(rows, call.plain("B"))
        return [scan(rows, -2, size, upper), *free]
    if call["self" if "self" in call.args else "A"].dim() > 2:
        codes = over(matrix, [-1, -2])
        if "B" not in call.args:
            return [codes, *free]
        if call["B"].dim() == matrix.dim():
            axis = -2 if call["left"] else -1
            return [torch.maximum(codes, over(call.plain("B"), axis)), *free]
    return [call.everything(), *free]


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
        scores = scores.masked_fill(_later(scores), -math.inf)
    mask = of.get("attn_mask")
    mask = of.get("attn_bias") if mask is None else mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def _later(scores: Tensor) -> Tensor:
    """Where a key is later; the first is aligned with the first query."""
    size = scores.shape[-2:]
    ones = torch.ones(size, dtype=torch.bool, device=scores.device)
    return ones.triu(1)


def grouped_product(of: Arguments) -> Tensor | None:
    """Return rows times the matrix of their group, the groups in order."""
    x, weights, ends = of["self"], of["mat2"], of.get("offs")
    if ends is None or x.dim() != 2 or weights.dim() != 3:
        return None
    at = torch.arange(len(x), device=x.device)
    group = (at.unsqueeze(1) >= ends).sum(1).clamp(max=len(weights) - 1)
    return (x.unsqueeze(1) @ weights[group]).squeeze(1)


def flex_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the operator's own eager formula."""
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention(*args, **kwargs)


FORMULAS: dict[str, Callable[..., Any]] = {
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
    "_grouped_mm": grouped_product,
    "flex_attention": flex_attention,
}
