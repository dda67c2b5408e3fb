"""Rules of what moves numbers, and of what makes them from nothing."""

import numpy as np
import torch
from torch import Tensor

from .call import Call, rule
from .lattice import FREE, KNOWN, full, lined_up, plain


@rule(
    "clone _to_copy detach alias lift_fresh lift contiguous view_copy "
    "resolve_conj resolve_neg _conj_physical positive detach_copy "
    "alias_copy",
    placed=True,
)
def same(call: Call) -> Tensor:
    """Keep the codes, and what is hidden hidden."""
    return call.codes("self")


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
        from .storages import Shadow

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
