"""How a tensor of a rank relates to those of one process."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comparison.values.layouts import largest, nearest_layout
from ..running.ranks import Ranks
from ..running.tolerances import PLACED_UNITS, PLACED_UNITS_OF_FLOAT64

OTHER = "another order"
PROBES = 16  # numbers of a tensor that are looked for first


@dataclass(frozen=True)
class Placed:
    """A tensor of a rank, as a part of one on one process."""

    of: "Whole"  # the tensor of one process
    # for each of its axes the indices that the rank has, in its order
    picked: tuple[tuple[int, ...], ...]

    @property
    def kind(self) -> str:
        """Whether it is "whole", "sliced", or in "another order"."""
        if any([*p] != sorted(p) for p in self.picked):
            return OTHER
        whole = [*map(len, self.picked)] == [*self.of.shape]
        return "whole" if whole else "sliced"

    def part_of(self, whole: Tensor) -> Tensor:
        """Return what the rank has of a tensor of that shape."""
        for axis, indices in enumerate(self.picked):
            whole = whole.index_select(axis, torch.tensor(indices))
        return whole

    def __str__(self) -> str:
        words = [
            f"{as_runs(picked)} of axis {axis}"
            for axis, picked in enumerate(self.picked)
            if picked != (*range(self.of.shape[axis]),)
        ]
        return " and ".join(words) or "all"


def as_runs(picked: Iterable[int]) -> str:
    """Return indices as runs: "0-3, 12-15"."""
    pairs = groupby(enumerate(picked), key=lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in run] for _, run in pairs]
    texts = [f"{r[0]}-{r[-1]}" if r[1:] else str(r[0]) for r in runs[:4]]
    return ", ".join(texts) + ", ..." * (len(runs) > 4)


@dataclass(eq=False)
class Whole:
    """A tensor of one process, in which those of a rank are looked for."""

    number: int  # to know it by
    name: str  # of a weight, or the line that computes a value
    op: str  # the operation that computes it
    tensor: Tensor  # in float64
    eps: float  # unit of rounding of the dtype that it was computed in

    def __post_init__(self):
        self.shape = tuple(self.tensor.shape)
        fine = self.eps == torch.finfo(torch.float64).eps
        units = PLACED_UNITS_OF_FLOAT64 if fine else PLACED_UNITS
        self.near = units * self.eps * largest(self.tensor)
        flat = self.tensor.flatten().numpy()
        self.order = np.argsort(flat, kind="stable")
        self.sorted = flat[self.order]
        self.between = (self.sorted[1:] + self.sorted[:-1]) / 2

    def nearest(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the nearest of the sorted numbers are, and how far."""
        at = np.searchsorted(self.between, numbers)
        with np.errstate(invalid="ignore"):
            return at, np.abs(numbers - self.sorted[at])

    def place(self, tensor: Tensor) -> Placed | None:
        """Return which part of this one a tensor is, None if it is none."""
        if nearest_layout(tensor, self.tensor, self.near)[1] <= self.near:
            return Placed(self, tuple(tuple(range(s)) for s in self.shape))
        numbers = tensor.flatten().numpy()
        at, apart = self.nearest(numbers)
        with np.errstate(invalid="ignore"):
            steps = np.diff(self.sorted, prepend=-np.inf, append=np.inf)
        alone = np.minimum(steps[:-1], steps[1:]) > 4 * self.near
        known = np.isfinite(numbers) & alone[at] & (apart <= self.near)
        axes = np.unravel_index(self.order[at[known]], self.shape)
        ours = np.unravel_index(np.flatnonzero(known), tensor.shape)
        for picked in (
            _axis_by_axis(axes, ours, self.shape, tuple(tensor.shape)),
            tuple(tuple(dict.fromkeys(axis.tolist())) for axis in axes),
        ):
            placed = Placed(self, picked)
            if np.prod([*map(len, picked)]) == tensor.numel():
                part = placed.part_of(self.tensor)
                if nearest_layout(tensor, part, self.near)[1] <= self.near:
                    return placed
        return None


def find(tensor: Tensor, op: str, wholes: Iterable[Whole]) -> Placed | None:
    """Return where a tensor of a rank stands, None if nowhere.

    One that the same operation computes is preferred.
    """
    known = np.unique(tensor[tensor.isfinite()].numpy())
    if not len(known):
        return None
    probes = known[np.linspace(0, len(known) - 1, PROBES).round().astype(int)]
    candidates = [
        whole
        for whole in wholes
        if (size := whole.tensor.numel()) >= tensor.numel()
        # tokens that were sent to the rank of their expert are any number
        and (
            whole.shape[-1:] == tensor.shape[-1:] or not size % tensor.numel()
        )
    ]
    for whole in sorted(
        candidates, key=lambda w: (w.tensor.numel(), w.op != op)
    ):
        near = whole.nearest(probes)[1] <= whole.near
        placed = whole.place(tensor) if near.all() else None
        if placed is not None:
            return placed
    return None


def _axis_by_axis(
    axes: tuple[np.ndarray, ...],
    ours: tuple[np.ndarray, ...],
    shape: tuple[int, ...],
    own: tuple[int, ...],
) -> tuple[tuple[int, ...], ...]:
    """Return the index on the left of each index, () where axes differ."""
    picked = []
    for here, there, size, whole in zip(ours, axes, own, shape, strict=False):
        table = np.full(size, -1)
        table[here] = there
        every, known = np.arange(size), np.flatnonzero(table >= 0)
        if len(shape) != len(own) or not len(known):
            return ()
        # rows of equal numbers alone follow the nearest that is known
        nearest = known[np.searchsorted((known[1:] + known[:-1]) / 2, every)]
        table = table[nearest] + every - nearest
        if table.min() < 0 or table.max() >= whole:
            return ()
        picked.append(tuple(table.tolist()))
    return tuple(picked)


def on_all_ranks(
    own: Mapping[str, tuple[str, Tensor | None]], ranks: Ranks
) -> tuple[dict[str, dict[int, str]], dict[str, Tensor]]:
    """Return how tensors stand on all ranks, and sums of those that do not.

    Own is by name how a tensor of this rank stands on the left, "" for
    nowhere, and the tensor itself where it may be a part of a sum. All ranks
    call this; a tensor is summed that stands nowhere on one of them.
    """
    own_facts = {
        name: [kind, None if tensor is None else [*tensor.shape]]
        for name, (kind, tensor) in own.items()
    }
    kinds, lost = {}, dict[str, Any]()
    for name, of_each in ranks.by_name(own_facts).items():
        kinds[name] = {i: one[0] for i, one in enumerate(of_each) if one}
        shapes = [one and one[1] for one in of_each]
        alike = None not in shapes and shapes.count(shapes[0]) == len(shapes)
        if alike and "" in kinds[name].values():
            lost[name] = own[name][1]
    return kinds, ranks.sums(lost)
