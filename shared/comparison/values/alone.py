"""Lines whose value the other side does not have, and what is known of it."""

from .found import NOWHERE, Row
from .parting import Flow
from .value import Value


def lines_alone(
    flow: Flow, other: Flow, paired: set[int], left: bool
) -> list[Row]:
    """Return the values of a side that are in no pair, and why."""
    found = []
    for value in flow.values:
        if value.number in paired or value.digest.trivial:
            continue
        if value.place.inside and value.number not in flow.seen:
            continue  # a step that no line of this side takes by itself
        why = _why(value, flow, other)
        found.append(
            Row(value.place, None, value.shape, None, why, (value.number, -1))
            if left
            else Row(
                None, value.place, value.shape, None, why, (-1, value.number)
            )
        )
    return found


def _why(value: Value, flow: Flow, other: Flow) -> str:
    if value.number in flow.seen:
        return "computed once more"
    for theirs in other.values:
        scale = theirs.digest.scale_of(value.digest)
        if scale is not None and abs(scale - 1) > 1e-6:
            return f"{scale:.4g} times {theirs.place}"
    if value.number not in flow.used:
        return "no part of the scores"
    if value.number not in flow.explained:
        return NOWHERE
    reached = {value.number}
    for later in flow.values[value.number + 1 :]:
        if reached.intersection(later.inputs):
            reached.add(later.number)
            if later.number in flow.seen:
                return f"a step to line {later.place.line} `{later.place.op}`"
    return ""
