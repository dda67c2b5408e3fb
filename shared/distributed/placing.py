"""Find which part of a one-process model's tensor a rank's tensor is."""

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
PROBES = 16  # how many numbers of a tensor are searched first


@dataclass(frozen=True)
class Placed:
    """A rank's tensor, as a part of a tensor of the one-process model."""

    of: "Whole"  # the tensor of one process
    # for each axis, the indices that the rank has, in the rank's order
    picked: tuple[tuple[int, ...], ...]

    @property
    def kind(self) -> str:
        """Return "whole", "sliced", or "in another order"."""
        if any([*p] != sorted(p) for p in self.picked):
            return OTHER
        whole = [*map(len, self.picked)] == [*self.of.shape]
        return "whole" if whole else "sliced"

    def part_of(self, whole: Tensor) -> Tensor:
        """Cut the rank's part out of a tensor with the shape of the whole."""
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
    """A tensor of the one-process model; `place` finds ranks' tensors in it.

    Its entries are sorted once, so that each search is fast.
    """

    number: int  # number that identifies the tensor
    name: str  # the name of a weight, or the line that computes the value
    op: str  # the operation that computes the value
    tensor: Tensor  # the numbers in float64
    eps: float  # unit of rounding of the original dtype

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
        """Return the indices of the nearest sorted numbers, and distances."""
        at = np.searchsorted(self.between, numbers)
        with np.errstate(invalid="ignore"):
            return at, np.abs(numbers - self.sorted[at])

    def place(self, tensor: Tensor) -> Placed | None:
        """Return which part of this tensor another tensor is, or None."""
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
    """Find a rank's tensor in one of the wholes; return its part, or None.

    Of equally large wholes, those of the same operation are tried first.
    """
    known = np.unique(tensor[tensor.isfinite()].numpy())
    if not len(known):
        return None
    probes = known[np.linspace(0, len(known) - 1, PROBES).round().astype(int)]
    candidates = [
        whole
        for whole in wholes
        if (size := whole.tensor.numel()) >= tensor.numel()
        # sizes may differ: the rank of an expert gets any number of tokens
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
    """Return, for each axis, which indices of the whole a part has; or ()."""
    picked = []
    for here, there, size, whole in zip(ours, axes, own, shape, strict=False):
        table = np.full(size, -1)
        table[here] = there
        every, known = np.arange(size), np.flatnonzero(table >= 0)
        if len(shape) != len(own) or not len(known):
            return ()
        # the nearest known row places a row that has only repeated numbers
        nearest = known[np.searchsorted((known[1:] + known[:-1]) / 2, every)]
        table = table[nearest] + every - nearest
        if table.min() < 0 or table.max() >= whole:
            return ()
        picked.append(tuple(table.tolist()))
    return tuple(picked)


def on_all_ranks(
    own: Mapping[str, tuple[str, Tensor | None]], ranks: Ranks
) -> tuple[dict[str, dict[int, str]], dict[str, Tensor]]:
    """Return each tensor's kind on each rank, and sums over the ranks.

    All ranks call this function. It sums each tensor that some rank does not
    find on the left.

    Args:
        own: by name, the kind of this rank's tensor ("" if the left lacks it),
            and the tensor if it may be a part of a sum.
        ranks: all ranks.
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
