"""Pair the weights of two models by value, and compare their gradients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...running.places import Place
from ...running.tolerances import GRADIENT_UNITS
from ...tracing.value import digest
from ...validation import dtype_name
from .layouts import largest, sorted_apart

SHOWN = 3  # most weights without a counterpart that a sentence names

Rows = Float[np.ndarray, "rows columns"]
# for the hash of each row or column: the weight's name, whether it is a
# column, and its index
Index = dict[int, tuple[str, bool, int]]


@dataclass(frozen=True)
class WeightMatch:
    """A weight of the right model, and its counterpart in the left model."""

    name: str  # name of the weight on the right
    # "equal", "transposed", "rows in another order", "halves interleaved",
    # "joined", "part", "zero" or "absent", perhaps with "rounded to bfloat16"
    how: str
    sources: tuple[str, ...] = ()  # left names; if "absent", the nearest name
    apart: float | None = None  # largest difference of sorted entries
    twins: tuple[str, ...] = ()  # names of all left weights with these entries


def match_weights(left: nn.Module, right: nn.Module) -> list[WeightMatch]:
    """Return the counterpart on the left for each weight of the right."""
    parameters = [*left.parameters(), *right.parameters()]
    wide = any(weight.dtype == torch.float64 for weight in parameters)
    kind = torch.float64 if wide else torch.float32
    ours, theirs = _tables(left, kind), _tables(right, kind)
    found: dict[str, WeightMatch] = {}
    for dtype in (kind, torch.bfloat16, torch.float16):
        open_ones = [name for name in theirs if name not in found]
        if not open_ones:
            break
        rounded = {n: t.to(dtype).to(kind) for n, t in ours.items()}
        index: Index = {}
        for name, table in rounded.items():
            for across in (False, True):
                for i, key in enumerate(_hashes(table, across)):
                    index.setdefault(key, (name, across, i))
        for name in open_ones:
            match = _find(name, theirs[name], index, rounded)
            if match is not None and dtype != kind:
                how = f"{match.how}, rounded to {dtype_name(dtype)}"
                match = WeightMatch(name, how, match.sources)
            if match is not None:
                found[name] = match
    return _tell_twins_apart(
        [
            found.get(name) or _nearest(name, table, ours)
            for name, table in theirs.items()
        ],
        ours,
    )


def _tell_twins_apart(
    matches: Sequence[WeightMatch], ours: Mapping[str, Tensor]
) -> list[WeightMatch]:
    """Choose among left weights with equal entries by name, else by order."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, table in ours.items():
        groups.setdefault((*table.shape, *_hashes(table)), []).append(name)
    twins = {name: group for group in groups.values() for name in group}
    free = {*ours} - {match.name for match in matches}
    found = []
    for match in matches:
        group = twins[match.sources[0]] if match.how == "equal" else []
        if len(group) > 1:
            others = [name for name in group if name in free] or group
            source = match.name if match.name in group else others[0]
            free -= {source}
            match = replace(match, sources=(source,), twins=tuple(group))
        found.append(match)
    return found


def describe(matches: list[WeightMatch]) -> str:
    """Return a sentence on how many weights have a counterpart."""
    absent = [match for match in matches if match.how == "absent"]
    kinds = Counter(m.how for m in matches if m not in absent).most_common()
    counts = ", ".join(f"{count} {how}" for how, count in kinds)
    text = (
        f"weights: {len(matches) - len(absent)} of {len(matches)} of the "
        f"right's are on the left" + (f" ({counts})" if counts else "")
    )
    for match in absent[:SHOWN]:
        text += f"; {match.name} is nowhere on the left"
        if match.sources:
            text += f": nearest {match.sources[0]}, {match.apart:.1g} apart"
    return text


def _tables(model: nn.Module, kind: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a model as tables in one dtype."""
    return {
        name: weight.detach().cpu().to(kind).reshape(weight.shape[0], -1)
        for name, weight in model.named_parameters()
        if weight.dim() and weight.numel() and weight.is_floating_point()
    }


def _hashes(table: Tensor, across: bool = False) -> list[int]:
    """Return a hash of each row or column; a vector is one row.

    The hash is a sum over the entries: each entry's bits times a random factor
    for its place. Columns are hashed without a transposed copy.
    """
    array = np.ascontiguousarray(table.numpy()) + 0.0  # adding 0.0: -0 is 0
    if 1 in array.shape:
        array, across = array.reshape(1, -1), False
    bits = array.view(np.int32).reshape(*array.shape, -1)
    size = bits.shape[not across], bits.shape[2]
    factors = np.random.default_rng(0).integers(2**63, size=size)
    axes = "rcb,rb->c" if across else "rcb,cb->r"
    return np.einsum(axes, bits, factors, dtype=np.int64).tolist()


def _find(
    name: str, table: Tensor, index: Index, ours: Mapping[str, Tensor]
) -> WeightMatch | None:
    """Return the counterpart of a weight, or None."""
    if not table.any():
        return WeightMatch(name, "zero")
    for across in (False, True):
        keys = _hashes(table, across)
        known = [index[key] for key in keys if key in index]
        if len(known) < len(keys):
            continue
        sources = tuple(dict.fromkeys(source for source, _, _ in known))
        turned = known[0][1] != across and table.size(1) > 1
        how = _order([i for _, _, i in known], turned)
        if ours[sources[0]].numel() > table.numel():
            how = "part"
        if len(sources) > 1:
            how = "joined"
        return WeightMatch(name, how, sources)
    return _vector(name, table, ours) if table.size(1) == 1 else None


def _order(rows: list[int], turned: bool) -> str:
    """Name the order in which the rows of a weight occur in another weight."""
    count = len(rows)
    if rows == [*range(count)]:
        return "transposed" if turned else "equal"
    for width in range(4, count + 1, 2):
        if count % width == 0:
            halves = np.arange(count).reshape(-1, 2, width // 2)
            pairs = halves.swapaxes(1, 2).flatten()
            if rows in (pairs.tolist(), pairs.argsort().tolist()):
                return "halves interleaved"
    return "rows in another order"


def _vector(
    name: str, table: Tensor, ours: Mapping[str, Tensor]
) -> WeightMatch | None:
    """Find a vector's counterpart: joined, permuted, or part of another."""
    values = table.flatten()
    vectors = {n: t.flatten() for n, t in ours.items() if t.size(1) == 1}
    for source, other in vectors.items():
        if other.numel() == values.numel():
            (ours_sorted, at), (mine_sorted, by) = (
                vector.sort(stable=True) for vector in (other, values)
            )
            if ours_sorted.equal(mine_sorted):
                how = _order(at[by.argsort()].tolist(), False)
                return WeightMatch(name, how, (source,))
        elif other.numel() % values.numel() == 0 and any(
            part.equal(values) for part in other.split(values.numel())
        ):
            return WeightMatch(name, "part", (source,))
    start, sources = 0, []
    while start < values.numel():
        for source, other in vectors.items():
            if other.equal(values[start : start + other.numel()]):
                sources.append(source)
                start += other.numel()
                break
        else:
            return None
    return WeightMatch(name, "joined", tuple(sources))


def _nearest(
    name: str, table: Tensor, ours: Mapping[str, Tensor]
) -> WeightMatch:
    """Return an "absent" match, with the nearest weight of the left."""
    mine = digest(table)
    near = [
        (mine.distance(digest(other)), source)
        for source, other in ours.items()
        if other.numel() == table.numel()
    ]
    if not near:
        return WeightMatch(name, "absent")
    apart, source = min(near)
    return WeightMatch(name, "absent", (source,), apart)


def first_difference(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    matches: Sequence[WeightMatch],
    detached: Sequence[Place],
    unit: float,
) -> tuple[str, int]:
    """Find the first gradient that differs, and count the compared ones.

    Only gradients of matched weights are compared, in any layout.

    Args:
        ours: gradients of the left, by the names of their weights.
        theirs: gradients of the right, in the order of the backward pass.
        matches: for each of the right's weights, its counterpart on the left.
        detached: lines of the right that detach a value.
        unit: the unit of rounding of both sides.

    Returns:
        A sentence on the gradient ("" if none differs), and the count.
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
        # if several left weights have equal entries, use the one with the
        # nearest gradient
        twins = [ours[twin].double() for twin in match.twins if twin in ours]
        apart = min(sorted_apart(one, right) for one in (left, *twins))
        size = largest(left)
        if apart > GRADIENT_UNITS * unit * max(size, largest(right)):
            lines = " and ".join(dict.fromkeys(map(str, detached)))
            why = f"; the right detaches at {lines}" if lines else ""
            sources = ", ".join(match.sources)
            if not right.any():
                why = f"; {match.name} gets no gradient{why}"
            elif not left.any():
                why = f"; {sources} gets no gradient{why}"
            return (
                f"one function, another gradient: that of {match.name} is "
                f"{apart:.2g} from that of {sources} on the left, whose "
                f"largest number is {size:.2g}{why}"
            ), count
    return "", count
