"""Put the left model's weights into a rank's parameters; compare gradients."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comparison.values.layouts import largest
from ..comparison.values.side import Side, unit_of
from ..running.ranks import Ranks, local, on_any
from ..running.tolerances import (
    GRADIENT_FLOOR_SHARE,
    GRADIENT_UNIT_AT_MOST,
    GRADIENT_UNITS,
)
from ..tracing.value import plain
from .placing import Whole, find, on_all_ranks

# if a larger share of a rank's parameters differs from the left's weights, the
# rank has not loaded these weights
UNLOADED_SHARE = 0.5
THIRDS = ("qkv", "c_attn", "query_key_value", "in_proj", "wqkv")
SHIFT = 0.1  # size of the noise that is added to vectors of equal numbers
DATA_PARALLEL = {"DistributedDataParallel", "FSDPModule"}

# For each parameter of a rank: the name of a parameter of the left, and a
# function that cuts the rank's piece out of that parameter.
Pieces = dict[str, tuple[str, Callable[[Tensor], Tensor]]]


@dataclass(frozen=True)
class Run:
    """The two runs: a model on one process, and this rank's part of it."""

    left: Side
    right: Side
    weights: Mapping[str, Tensor]  # the left's weights; empty for a recording
    part: nn.Module  # this rank's module
    pieces: Pieces  # for each parameter of the part, its piece of the left
    ranks: Ranks


@torch.no_grad()
def put_weights(
    ours: Mapping[str, Tensor], right: nn.Module, ranks: Ranks
) -> tuple[str, Pieces]:
    """Put the left model's weights into a rank's shards; say what was done.

    If most parameters already equal the left's, the model has loaded its
    weights. Then nothing is changed, and each parameter that differs is looked
    up among the left's weights.

    Otherwise the rank gets the left's weights. Vectors of equal entries change
    on both sides, because a bias of zeros would hide that it is added twice.

    Raises:
        ValueError: if a parameter fits no weight of the left model.
    """
    theirs = {name: local(p) for name, p in right.named_parameters()}
    pieces = pieces_of(ours, right, ranks)

    def piece_of(name: str) -> Tensor:
        source, cut = pieces[name]
        return cut(ours[source].detach()).to(theirs[name])

    other = [n for n in pieces if not piece_of(n).equal(theirs[n])]
    free = [name for name in theirs if name not in pieces]
    loaded = len(other) < UNLOADED_SHARE * len(pieces)
    shapes = [f"{name} {(*theirs[name].shape,)}" for name in free]
    of_all = ranks.gather([loaded, ", ".join(shapes)])
    if all(loaded for loaded, _ in of_all):
        wholes = [
            Whole(i, name, name, plain(weight), eps=0.0)
            for i, (name, weight) in enumerate(ours.items())
        ]
        but = []
        for name in [*other, *free]:
            own = plain(theirs[name])
            source, _ = pieces.pop(name, (name, None))
            placed, where = find(own, source, wholes), "none of them"
            if placed is not None:
                where = f"{placed} of {placed.of.name}"
                # keep the piece only if the layout is the same
                if placed.part_of(placed.of.tensor).equal(own):
                    pieces[name] = placed.of.name, placed.part_of
            but.append(f"{name} is {where}")
        words = "the ranks have the left's weights"
        for rank, names in enumerate(ranks.gather(but[:3])):
            words += f"; on rank {rank} {', '.join(names)}" * bool(names)
        zeros = [n for n, w in ours.items() if "bias" in n and not w.any()]
        hidden = f"; {len(zeros)} biases are 0, which hides one added twice"
        return words + hidden * bool(zeros), pieces
    for rank, (_, names) in enumerate(of_all):
        if names:
            raise ValueError(
                f"rank {rank} has weights that fit no weight of the left: "
                f"{names}; load the left's weights where the model is built"
            )
    sums = {
        name: zlib.crc32(theirs[name].cpu().float().numpy().tobytes())
        for name, (source, _) in pieces.items()
        if theirs[name].numel() == ours[source].numel()
    }
    apart = [
        n for n, b in ranks.by_name(sums).items() if len({*b} - {None}) > 1
    ]
    generator = torch.Generator().manual_seed(0)
    for weight in {id(weight): weight for weight in ours.values()}.values():
        if weight.dim() == 1 and bool((weight == weight[0]).all()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(SHIFT * noise.to(weight))
    for name in pieces:
        theirs[name].copy_(piece_of(name))
    began = f"; the ranks started with different {', '.join(apart[:3])}"
    words = f"each rank got {len(pieces)} weights of the left"
    return words + began * bool(apart), pieces


def pieces_of(
    ours: Mapping[str, Tensor], right: nn.Module, ranks: Ranks
) -> Pieces:
    """Return, for each parameter of a rank, its piece of a left weight.

    The weight has the same name as the parameter, or the nearest one. The
    piece is the whole weight, or this rank's part along one axis. Fused
    queries, keys and values are cut separately. A DTensor gets the piece that
    its placements say.
    """
    theirs = dict(right.named_parameters())
    fits = {
        name: [o for o in ours if _cut(ours[o], p, ranks) is not None]
        for name, p in theirs.items()
    }
    taken = {name for name in theirs if name in fits[name]}
    pieces: Pieces = {}
    for name, parameter in theirs.items():
        near = {
            other: _shared(name, other)
            for other in fits[name]
            if name == other or not ({name, other} & taken)
        }
        best = [o for o in near if near[o] == max(near.values())]
        if len(best) == 1:
            cut = partial(_piece_of, best[0], parameter, ranks)
            pieces[name] = best[0], cut
    return pieces


def _shared(name: str, other: str) -> int:
    """Count the parts that two dotted names share at the start and end."""
    one, two = name.split("."), other.split(".")
    return sum(
        a == b
        for ours, theirs in ((one, two), (one[::-1], two[::-1]))
        for a, b in zip(ours, theirs, strict=False)
    )


def _cut(weight: Tensor, parameter: Tensor, ranks: Ranks) -> list[int] | None:
    """Return the axis along which a parameter is a piece of a weight.

    Return [] if it is the whole weight, and None if it does not fit.
    """
    pairs = [*enumerate(zip(weight.shape, parameter.shape, strict=False))]
    axes = [axis for axis, (size, part) in pairs if size != part]
    fits = all(size in (part, ranks.count * part) for _, (size, part) in pairs)
    fits &= weight.dim() == parameter.dim()
    return axes if fits and len(axes) < 2 else None


def _piece_of(
    name: str, parameter: Tensor, ranks: Ranks, weight: Tensor
) -> Tensor:
    """Return this rank's piece of a weight or of a gradient."""
    if local(parameter) is not parameter:
        from torch.distributed.tensor import distribute_tensor

        where: Any = parameter
        whole = weight.to(parameter.device)
        mesh, placements = where.device_mesh, where.placements
        return local(distribute_tensor(whole, mesh, placements))
    for axis in _cut(weight, parameter, ranks) or []:
        fused = any(part in THIRDS for part in name.lower().split("."))
        thirds = fused and weight.size(axis) % 3 == 0
        parts = weight.chunk(3, axis) if thirds else [weight]
        own = [part.chunk(ranks.count, axis)[ranks.rank] for part in parts]
        weight = torch.cat(own, axis)
    return weight


def compare_gradients(run: Run) -> dict[str, Any]:
    """Compare each gradient with this rank's piece of the left's gradient.

    If several ranks hold a parameter, each may have only a term of its
    gradient. The training code sums these terms, so this is not a difference.

    Returns:
        The attributes of a ShardedDiff that describe the gradients.
    """
    ranks, own_text = run.ranks, _is_data_parallel(run)
    ours, theirs = _gradients_of(run, own_text)
    pieces = {n: piece for n, piece in run.pieces.items() if piece[0] in ours}
    if on_any(bool(pieces) and not theirs):
        return {}  # a pipeline's schedule runs the backward pass itself
    unit = min(unit_of(run.left, run.right), GRADIENT_UNIT_AT_MOST)
    unit *= GRADIENT_UNITS
    floor = GRADIENT_FLOOR_SHARE * max(
        map(largest, ours.values()), default=0.0
    )
    wanted, words = dict[str, Tensor](), dict[str, str]()
    own = dict[str, tuple[str, Tensor | None]]()
    for name in dict.fromkeys([*theirs, *sorted(pieces)]):
        if name in pieces:
            source, cut = pieces[name]
            want = wanted[name] = cut(ours[source]).cpu().double()
            mine = theirs.get(name, torch.zeros_like(want)).double()
            if differs := differs_how(mine, want, unit, floor):
                words[name] = f"{differs} of {source} on the left"
            whole = want.numel() == ours[source].numel()
            own[name] = "" if differs else "equal", mine if whole else None
    kinds, sums = on_all_ranks(own, ranks)
    summed = [
        name
        for name, total in sums.items()
        if not differs_how(total, wanted[name], unit, floor)
    ]
    # the backward pass reaches the last stage of a pipeline first
    names = sorted(kinds, key=lambda name: -min(kinds[name]))
    unlike = [n for n in names if "" in kinds[n].values() and n not in summed]
    sentence = ""
    if unlike:
        first = unlike[0]
        said = ranks.gather(words.get(first, ""))
        rank = next(i for i, text in enumerate(said) if text)
        sentence = f"on rank {rank} the gradient of {first} {said[rank]}"
        if before := [n for n in names[: names.index(first)] if n in summed]:
            sentence += (
                f"; that of {before[-1]}, which the backward pass reaches "
                f"earlier, is a part of a sum on each rank: is a sum missing "
                f"after it?"
            )
        if own_text:
            sentence += (
                "; each rank ran a different text, and the left's is the "
                "mean over them: is the gradient reduced?"
            )
    return {
        "same": not sentence,
        "gradients": len(names),
        "partial_gradients": tuple(summed),
        "gradient": sentence,
    }


def _is_data_parallel(run: Run) -> bool:
    """Return whether each rank is meant to run a different text."""
    kinds = {k.__name__ for m in run.part.modules() for k in type(m).__mro__}
    meshes = [getattr(p, "device_mesh", None) for p in run.part.parameters()]
    one_axis = all(mesh is None or mesh.ndim == 1 for mesh in meshes)
    return bool(kinds & DATA_PARALLEL and run.weights) and one_axis


def _gradients_of(
    run: Run, own_text: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of both models, by the names of parameters.

    A data-parallel model runs a different text on each rank, and averages the
    gradients. If all ranks ran the same text, a gradient that is not averaged
    would not be noticed.
    """
    sides, ranks = (run.left, run.right), run.ranks
    if own_text:
        for side in sides:
            side.tokens = (side.tokens + ranks.rank) % side.scores.size(-1)
    ranks.own_texts = own_text
    ours, theirs = (side.gradients() for side in sides)
    ranks.own_texts = False
    if run.weights:
        known = {id(run.weights[name]): grad for name, grad in ours.items()}
        ours = {
            name: known.get(id(weight), torch.zeros_like(weight).cpu())
            for name, weight in run.weights.items()
        }
    if own_text:
        ours = {n: g / ranks.count for n, g in ranks.sums(ours).items()}
    return ours, theirs


def differs_how(mine: Tensor, want: Tensor, unit: float, floor: float) -> str:
    """Say how far two gradients differ; return "" if only by rounding."""
    near = unit * max(largest(want), largest(mine), floor)
    if bool(((mine - want).abs() <= near).all()):
        return ""
    share = float((mine * want).sum() / (want * want).sum().clamp(min=1e-300))
    if bool(((mine - share * want).abs() <= near).all()):
        return f"is {share:.3g} times that"
    apart = float((mine - want).abs().max())
    return f"is {apart:.2g} apart (of up to {largest(want):.2g}) from that"
