"""Rules of what reads and writes by ids, and of what sorts."""

from typing import Any

import torch
from torch import Tensor

from .call import Call, rule
from .lattice import CODES, FREE, KNOWN, is_hidden, over, plain, united
from .rules_mixing import visible

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


@rule("index _unsafe_index")
def indexed(call: Call) -> Tensor:
    """Read by ids, as x[i, :, j] does."""
    x, ids = call["self"], call["indices"]
    axes, known = _spread(call, ids)
    codes = call.codes("self")
    if known:
        return torch.ops.aten.index(codes.expand(x.shape), ids)
    given = [i for i in ids if i is not None]
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
