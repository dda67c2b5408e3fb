"""Where the numbers of a rank stand among those of one process."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..values.layouts import largest, nearest_layout

UNITS = 2**9  # of rounding: sums in another order are that far apart
FINER = 2**16  # the same in float64, in which no fault is so small
OTHER = "another order"
PROBES = 16  # numbers of a value that are looked for first


@dataclass(frozen=True)
class Placed:
    """A value of a rank, as a part of a value of one process.

    Attributes:
        value: number of the value of one process.
        shape: of that value.
        picked: for each of its axes the indices that the rank has, in the
            order it has them.
    """

    value: int
    shape: tuple[int, ...]
    picked: tuple[tuple[int, ...], ...]

    @property
    def kind(self) -> str:
        """Whether it is "whole", "sliced", or in "another order"."""
        sizes = [*map(len, self.picked)]
        if sizes != [*self.shape]:
            return "sliced"
        return "whole" if self.ascending else OTHER

    @property
    def ascending(self) -> bool:
        """Whether the rank has the numbers in the order of the left."""
        return all([*p] == sorted(p) for p in self.picked)

    def part_of(self, whole: Tensor) -> Tensor:
        """Return what the rank has of a value of that shape."""
        for axis, indices in enumerate(self.picked):
            whole = whole.index_select(axis, torch.tensor(indices))
        return whole

    def __str__(self) -> str:
        words = [
            f"{as_runs(picked)} of axis {axis}"
            for axis, picked in enumerate(self.picked)
            if picked != (*range(self.shape[axis]),)
        ]
        return " and ".join(words) or "all"


def as_runs(picked: Iterable[int]) -> str:
    """Return indices as runs: "0-3, 12-15"."""
    runs: list[list[int]] = []
    for index in picked:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    texts = [f"{a}-{b}" if a < b else str(a) for a, b in runs[:4]]
    return ", ".join(texts) + ", ..." * (len(runs) > 4)


class Finder:
    """The values of one process, in which those of a rank are looked for.

    Args:
        values: in float64, by their numbers.
        ops: what computes each.
        eps: unit of rounding of the dtype that both ran in.
    """

    def __init__(
        self, values: dict[int, Tensor], ops: dict[int, str], eps: float
    ):
        self.values, self.ops = values, ops
        units = FINER if eps == torch.finfo(torch.float64).eps else UNITS
        self.near = {n: units * eps * largest(v) for n, v in values.items()}
        self.order = {
            n: np.argsort(v.flatten().numpy(), kind="stable")
            for n, v in values.items()
        }
        self.sorted = {
            n: v.flatten().numpy()[self.order[n]] for n, v in values.items()
        }

    def find(self, value: Tensor, op: str) -> Placed | None:
        """Return where a value of a rank stands, None if nowhere."""
        numbers = value.flatten().numpy()
        known = np.unique(numbers[np.isfinite(numbers)])
        if not len(known):
            return None
        ends = np.linspace(0, len(known) - 1, PROBES).round().astype(int)
        candidates = sorted(
            (self.values[n].numel(), self.ops[n] != op, n)
            for n in self.values
            if self.values[n].numel() >= value.numel()
            and (
                self.values[n].numel() % value.numel() == 0
                # tokens that were sent to the rank of their expert
                or self.values[n].shape[-1:] == value.shape[-1:]
            )
        )
        for _, _, number in candidates:
            if self._all_in(known[ends], number):
                found = self._against(value, number)
                if found is not None:
                    return found
        return None

    def _nearest(
        self, numbers: np.ndarray, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return of sorted numbers the places nearest, and the distances."""
        table = self.sorted[number]
        right = np.searchsorted(table, numbers).clip(1, len(table) - 1)
        left = right - 1
        nearer = np.abs(numbers - table[left]) <= np.abs(
            numbers - table[right]
        )
        at = np.where(nearer, left, right)
        return at, np.abs(numbers - table[at])

    def _all_in(self, numbers: np.ndarray, number: int) -> bool:
        with np.errstate(invalid="ignore"):
            apart = self._nearest(numbers, number)[1]
        return bool((apart <= self.near[number]).all())

    def _against(self, value: Tensor, number: int) -> Placed | None:
        whole, near = self.values[number], self.near[number]
        shape = tuple(whole.shape)
        if nearest_layout(value, whole, near)[1] <= near:
            every = tuple(tuple(range(size)) for size in shape)
            return Placed(number, shape, every)
        table = self.sorted[number]
        numbers = value.flatten().numpy()
        with np.errstate(invalid="ignore"):
            at, apart = self._nearest(numbers, number)
            steps = np.diff(table, prepend=-np.inf, append=np.inf)
            alone = np.minimum(steps[:-1], steps[1:]) > 4 * near
        known = np.isfinite(numbers) & alone[at] & (apart <= near)
        if not known.any():
            return None
        axes = np.unravel_index(self.order[number][at[known]], shape)
        ours = np.unravel_index(np.flatnonzero(known), value.shape)
        for picked in (
            _axis_by_axis(axes, ours, shape, tuple(value.shape)),
            tuple(_first_seen(axis) for axis in axes),
        ):
            if picked is None:
                continue
            if np.prod([len(p) for p in picked]) != value.numel():
                continue
            placed = Placed(number, shape, picked)
            if nearest_layout(value, placed.part_of(whole), near)[1] <= near:
                return placed
        return None


def _first_seen(axis: np.ndarray) -> tuple[int, ...]:
    return tuple(dict.fromkeys(axis.tolist()))


def _axis_by_axis(
    axes: tuple[np.ndarray, ...],
    ours: tuple[np.ndarray, ...],
    shape: tuple[int, ...],
    own: tuple[int, ...],
) -> tuple[tuple[int, ...], ...] | None:
    """Return the index on the left of each index, where axes are the same."""
    if len(shape) != len(own):
        return None
    picked = []
    for here, there, size, whole in zip(ours, axes, own, shape, strict=True):
        table = np.full(size, -1)
        table[here] = there
        every, known = np.arange(size), np.flatnonzero(table >= 0)
        # rows of equal numbers alone follow the nearest that is known
        between = (known[1:] + known[:-1]) / 2
        nearest = known[np.searchsorted(between, every)]
        table = table[nearest] + every - nearest
        if table.min() < 0 or table.max() >= whole:
            return None
        picked.append(tuple(table.tolist()))
    return tuple(picked)
