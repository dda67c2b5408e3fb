"""Lines whose value the other side does not have, and what is known of it."""

from .found import NOWHERE, Alone
from .parting import Flow
from .side import Side
from .value import Value


def lines_alone(
    side: Side, other: Side, seen: tuple[set[int], set[int]], paired: set[int]
) -> list[Alone]:
    """Return the values of a side that are in no pair, and why."""
    flow = Flow(side, seen[0], {})
    found = []
    for value in flow.values:
        if value.number in paired or value.digest.trivial:
            continue
        if value.place.inside and value.number not in seen[0]:
            continue  # a step that no line of this side takes by itself
        why = _why(value, flow, seen[0], other)
        found.append(Alone(value.place, value.shape, why, value.number))
    return found


def _why(value: Value, flow: Flow, seen: set[int], other: Side) -> str:
    if value.number in seen:
        return "computed once more"
    for theirs in other.first.values:
        scale = theirs.digest.scale_of(value.digest)
        if scale is not None:
            return f"{scale:.4g} times {theirs.place}"
    if value.number not in flow.used:
        return "no part of the scores"
    if value.number not in flow.explained:
        return NOWHERE
    reached = {value.number}
    for later in flow.values[value.number + 1 :]:
        if reached.intersection(later.inputs):
            reached.add(later.number)
            if later.number in seen:
                return f"a step to line {later.place.line} `{later.place.op}`"
    return ""
