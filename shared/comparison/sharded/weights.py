"""The weights of a model on one process, put into the shards of a rank."""

import zlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ...invariants.ranks import Ranks, local

MOST = 0.5  # of a rank's parameters that are the left's: it has its own
THIRDS = ("qkv", "c_attn", "query_key_value", "in_proj", "wqkv")
SHIFT = 0.1  # of what is drawn in place of zeros or ones


@torch.no_grad()
def put_weights(
    left: nn.Module, right: nn.Module, ranks: Ranks
) -> tuple[str, dict[str, str]]:
    """Put the left's weights into a rank's shards; say what was done.

    Returns the sentence, and the left's parameter of each of the right's.

    A parameter comes from the left's of the same name, else from the only
    one whose name is nearest: all of it, or of one axis the piece of this
    rank. Of queries, keys and values in one tensor each is cut. A DTensor
    is distributed as its placements say. Where most parameters are the
    left's already, the model has loaded them, and none is changed. Else
    vectors of one number, such as biases of zeros, are drawn anew on both
    sides: a bias of zeros may be added twice.

    Raises:
        ValueError: for a parameter that no weight of the left fits.
    """
    ours = dict(left.named_parameters(remove_duplicate=False))
    theirs = dict(right.named_parameters())
    sources = sources_of(ours, right, ranks.count)
    pieces = _pieces(sources, ours, theirs, ranks)
    other = [n for n, p in pieces.items() if not p.equal(local(theirs[n]))]
    missing = [f"{n} {(*theirs[n].shape,)}" for n in theirs if n not in pieces]
    found = ranks.gather([other, len(pieces), ", ".join(missing)])
    if all(len(names) < MOST * count for names, count, _ in found):
        but = [
            f", of rank {rank} all but {', '.join(names[:3])}"
            for rank, (names, _, _) in enumerate(found)
            if names
        ]
        zeros = [n for n, w in ours.items() if "bias" in n and not w.any()]
        hidden = f"; {len(zeros)} biases are 0, which hides one added twice"
        words = "".join(but) + hidden * bool(zeros)
        return f"the ranks have the left's weights{words}", sources
    for rank, (_, _, names) in enumerate(found):
        if names:
            raise ValueError(
                f"rank {rank} has weights that none of the left fits: "
                f"{names}; load the left's weights where the model is built"
            )
    apart = _apart(sources, ours, theirs, ranks)
    generator = torch.Generator().manual_seed(0)
    for weight in left.parameters():
        if weight.dim() == 1 and bool((weight == weight[0]).all()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(SHIFT * noise.to(weight))
    pieces = _pieces(sources, ours, theirs, ranks)
    for name, parameter in theirs.items():
        local(parameter).copy_(pieces[name])
    began = f"; the ranks began with other numbers in {', '.join(apart[:3])}"
    return (
        f"{len(pieces)} weights of the left put into each rank"
        f"{began * bool(apart)}",
        sources,
    )


def _pieces(
    sources: Mapping[str, str],
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    ranks: Ranks,
) -> dict[str, Tensor]:
    """Return what each parameter of a rank holds of the left's weights."""
    return {
        name: piece_of(
            sources[name], ours[sources[name]], parameter, ranks
        ).to(local(parameter))
        for name, parameter in theirs.items()
        if name in sources
    }


def _apart(
    sources: Mapping[str, str],
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    ranks: Ranks,
) -> list[str]:
    """Return the parameters that are whole on several ranks, and unlike."""
    sums = {
        name: zlib.crc32(p.cpu().float().numpy().tobytes())
        for name, p in theirs.items()
        if local(p) is p and p.shape == ours[sources[name]].shape
    }
    found = ranks.by_name(sums).items()
    return [name for name, bits in found if len({*bits} - {None}) > 1]


def sources_of(
    ours: Mapping[str, Tensor], right: nn.Module, count: int
) -> dict[str, str]:
    """Return the name of the left's weight for each parameter of a rank."""
    theirs = dict(right.named_parameters())
    found = {
        name: name
        for name, parameter in theirs.items()
        if name in ours and _fits(ours[name], parameter, count)
    }
    free = [name for name in ours if name not in found]
    for name in theirs.keys() - found.keys():
        near = {
            other: _shared(name, other)
            for other in free
            if _fits(ours[other], theirs[name], count)
        }
        best = [n for n in near if near[n] == max(near.values())]
        if len(best) == 1:
            found[name] = best[0]
    return found


def _shared(name: str, other: str) -> int:
    """Return how many parts two names begin and end with alike."""

    def alike(these: Sequence[str], those: Sequence[str]) -> int:
        pairs = zip(these, those, strict=False)
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)
        )

    one, two = name.split("."), other.split(".")
    return alike(one, two) + alike(one[::-1], two[::-1])


def _fits(weight: Tensor, parameter: Tensor, count: int) -> bool:
    """Whether a parameter is as large as a weight, or as one rank's piece."""
    if weight.dim() != parameter.dim():
        return False
    pairs = zip(weight.shape, parameter.shape, strict=True)
    changed = [(whole, part) for whole, part in pairs if whole != part]
    return not changed or (
        len(changed) == 1 and changed[0][0] == count * changed[0][1]
    )


def piece_of(
    name: str, weight: Tensor, parameter: Tensor, ranks: Ranks
) -> Tensor:
    """Return what of a weight, or of its gradient, belongs to this rank."""
    if local(parameter) is not parameter:
        from torch.distributed.tensor import distribute_tensor

        where: Any = parameter
        whole = weight.detach().to(parameter.device)
        return local(
            distribute_tensor(whole, where.device_mesh, where.placements)
        )
    for axis, size in enumerate(weight.shape):
        if size != parameter.size(axis):
            break
    else:
        return weight
    fused = any(part in THIRDS for part in name.lower().split("."))
    parts = weight.chunk(3, axis) if fused and size % 3 == 0 else [weight]
    own = [part.chunk(ranks.count, axis)[ranks.rank] for part in parts]
    return torch.cat(own, axis)
