"""Gradients of a rank's parameters against those of one process."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...invariants.ranks import Ranks, local
from ..values.gradients import UNITS
from ..values.layouts import largest
from .weights import piece_of

FLOOR = 1e-3  # of the largest gradient: that of a key's bias is rounding alone


def compare_gradients(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    sources: Mapping[str, str],
    ranks: Ranks,
    unit: float,
) -> tuple[int, list[str], str]:
    """Compare each gradient with what belongs to this rank of the left's.

    Of a parameter that several ranks hold each may have a part of the
    gradient, which the training code sums up: that is no difference. Stages
    of a pipeline hold parameters of other names.

    Args:
        ours: gradients by the names of the left's parameters.
        theirs: of this rank, in the order of the backward pass.
        parameters: of this rank.
        sources: the left's parameter of each of the right's.
        ranks: all; each calls this.
        unit: of rounding.

    Returns:
        How many were compared, the names of those that are parts of a sum
        over the ranks, and a sentence on the first that differs, or "".
    """
    floor = FLOOR * max(map(largest, ours.values()), default=0.0)
    mine, wanted = dict[str, Tensor](), dict[str, Tensor]()
    near, found = dict[str, float](), dict[str, tuple[int, int, str]]()
    for name in dict.fromkeys([*theirs, *sorted(parameters)]):
        parameter, whole = parameters[name], ours[sources[name]]
        want = piece_of(sources[name], whole, parameter, ranks).double()
        own = theirs.get(name, torch.zeros_like(want)).double()
        near[name] = UNITS * unit * max(largest(want), largest(own), floor)
        shared = local(parameter) is parameter and want.shape == whole.shape
        size = want.numel() if shared else 0
        if words := _differs(own, want, near[name]):
            words = f"{name} {words} of {sources[name]} on the left"
        found[name] = ranks.rank, size, words
        mine[name], wanted[name] = own.flatten(), want.flatten()
    held = {
        name: [one for one in of_each if one is not None]
        for name, of_each in ranks.by_name(found).items()
    }
    # of stages the backward pass reaches the last one first
    names = sorted(held, key=lambda name: -held[name][0][0])
    unlike = [n for n in names if any(words for _, _, words in held[n])]
    sizes = {n: held[n][0][1] for n in unlike if all(s for _, s, _ in held[n])}
    sums = ranks.sums(
        {n: mine.get(n, torch.zeros(size)) for n, size in sizes.items()}
    )
    apart = ranks.by_name(
        {n: _differs(sums[n], wanted[n], near[n]) for n in sizes if n in mine}
    )
    partial = [name for name in sizes if not any(apart[name])]
    first = next((name for name in unlike if name not in partial), None)
    if first is None:
        return len(names), partial, ""
    rank, _, words = next(one for one in held[first] if one[2])
    before = [n for n in partial if names.index(n) < names.index(first)]
    if before:
        words += (
            f"; that of {before[-1]}, reached before by the backward pass, is "
            f"a part of a sum on each rank: is a sum missing behind it?"
        )
    return len(names), partial, f"on rank {rank} the gradient of {words}"


def _differs(mine: Tensor, want: Tensor, near: float) -> str:
    """Say how far a gradient is from another, "" where it is that."""
    if bool(((mine - want).abs() <= near).all()):
        return ""
    if not mine.any():
        return "is 0, and not that"
    share = float((mine * want).sum() / (want * want).sum().clamp(min=1e-300))
    if share and bool(((mine - share * want).abs() <= near).all()):
        return f"is {share:.3g} times that"
    apart = float((mine - want).abs().max())
    return f"is {apart:.2g} apart (of up to {largest(want):.2g}) from that"
