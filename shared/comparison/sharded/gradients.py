"""Gradients of a rank's parameters against those of one process."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...invariants.ranks import Ranks, local
from ..values.gradients import UNITS
from ..values.layouts import largest
from .weights import piece_of

FLOOR = 1e-3  # of the largest gradient: that of a key's bias is rounding alone


def compare_gradients(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    modules: tuple[nn.Module, nn.Module],
    sources: Mapping[str, str],
    ranks: Ranks,
    unit: float,
) -> tuple[int, list[str], str]:
    """Compare each gradient with what belongs to this rank of the left's.

    Of a parameter that all ranks hold each may have a part of the gradient,
    which the training code sums up: that is no difference.

    Args:
        ours: gradients by the names of the left's parameters.
        theirs: of this rank, in the order of the backward pass.
        modules: the left, and this rank's part of the right.
        sources: the left's parameter of each of the right's.
        ranks: all; each calls this.
        unit: of rounding.

    Returns:
        How many were compared, the names of those that are parts of a sum
        over the ranks, and a sentence on the first that differs, or "". None
        is compared where the ranks have parameters of other names.
    """
    weights = dict(modules[0].named_parameters(remove_duplicate=False))
    parameters = dict(modules[1].named_parameters())
    if len({*ranks.texts(json.dumps(sorted(parameters)))}) > 1:
        return 0, [], ""
    known = {id(weights[name]): gradient for name, gradient in ours.items()}
    floor = FLOOR * max(map(largest, ours.values()), default=0.0)
    first = json.loads(ranks.texts(json.dumps([*theirs]))[0])
    partial: list[str] = []
    names = [*dict.fromkeys([*first, *sorted(parameters)])]
    for count, name in enumerate(names, 1):
        parameter, source = parameters[name], sources[name]
        weight = weights[source]
        gradient = known.get(id(weight), torch.zeros_like(weight)).cpu()
        want = local(piece_of(source, gradient, parameter, ranks)).double()
        mine = theirs.get(name, torch.zeros_like(want)).double()
        near = UNITS * unit * max(largest(want), largest(mine), floor)
        equal = bool(((mine - want).abs() <= near).all())
        texts = ranks.texts("" if equal else _differs(mine, want, near))
        if not any(texts):
            continue
        if local(parameter) is parameter and want.shape == weight.shape:
            apart = (ranks.summed(mine) - want).abs()
            if not any(ranks.texts("no" * bool((apart > near).any()))):
                partial.append(name)
                continue
        rank, words = next((r, t) for r, t in enumerate(texts) if t)
        before = ""
        if partial:
            before = (
                f"; that of {partial[-1]}, reached before by the backward "
                f"pass, is a part of a sum on each rank: is a sum missing "
                f"behind it?"
            )
        found = (
            f"on rank {rank} the gradient of {name} {words} of {source} on "
            f"the left{before}"
        )
        return count, partial, found
    return len(names), partial, ""


def _differs(mine: Tensor, want: Tensor, near: float) -> str:
    """Say how far a gradient is from another."""
    if not mine.any():
        return "is 0, and not that"
    share = float((mine * want).sum() / (want * want).sum().clamp(min=1e-300))
    if share and bool(((mine - share * want).abs() <= near).all()):
        return f"is {share:.3g} times that"
    apart = float((mine - want).abs().max())
    return f"is {apart:.2g} apart (of up to {largest(want):.2g}) from that"
