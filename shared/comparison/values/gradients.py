"""Gradients of two models that are one function: the first that differs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...invariants.places import Place
from .layouts import largest, sorted_apart
from .weights import WeightMatch

UNITS = 2**10  # units of rounding of the largest number of a gradient


def first_difference(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    matches: Sequence[WeightMatch],
    detached: Sequence[Place],
    unit: float,
) -> tuple[str, int]:
    """Say which gradient differs first, if any, and how many were compared.

    Both by the names of the weights, the right's in the order of its backward
    pass, of weights that match but for their layout. Detached are lines of
    the right that detach a value; the unit of rounding is that of both.
    """
    order = {name: i for i, name in enumerate(theirs)}
    count = 0
    for match in sorted(matches, key=lambda m: order.get(m.name, len(order))):
        parts = [ours[s].flatten() for s in match.sources if s in ours]
        if match.how in ("absent", "zero", "part") or len(parts) < len(
            match.sources
        ):
            continue
        left = torch.cat(parts).double()
        right = theirs.get(match.name, torch.zeros(left.numel())).double()
        if left.numel() != right.numel():
            continue
        count += 1
        # the value tells which of several of the same numbers it is
        twins = [ours[twin].double() for twin in match.twins if twin in ours]
        apart = min(sorted_apart(one, right) for one in (left, *twins))
        size = largest(left)
        if apart > UNITS * unit * max(size, largest(right)):
            lines = " and ".join(map(str, detached))
            why = f"; the right detaches at {lines}" if lines else ""
            sources = ", ".join(match.sources)
            if not right.any():
                why = f"; {match.name} gets none at all{why}"
            elif not left.any():
                why = f"; {sources} gets none at all{why}"
            return (
                f"one function, another gradient: that of {match.name} is "
                f"{apart:.2g} from that of {sources} on the left, whose "
                f"largest number is {size:.2g}{why}"
            ), count
    return "", count
