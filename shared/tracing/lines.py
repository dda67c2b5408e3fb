"""Find the first line of a model whose value differs between two runs.

Two texts that are equal before a split must have equal values there.
`last_piece.py` compares a piece decoded with a cache.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..running.collectives import finished, is_collective
from ..running.operations import (
    UNSET,
    below_autograd,
    operations_through,
    tensors_in,
)
from ..running.places import Place, code_of, find_call, layers_of, names_of
from ..running.tolerances import INSIDE_EXPONENT

NUMBERS_OF_A_RUN = 2**27  # most numbers to keep: later lines are left out

Run = Callable[[], object]
# a function that gets a line's key, its place and its value
Visitor = Callable[[Hashable, Place, Tensor], None]


@dataclass(frozen=True)
class Line:
    """A line whose value differs between two runs.

    Attributes:
        place: the line.
        apart: the largest difference between the line's values.
        kept: how many positions the piece and the whole have, if the line
            drops positions of a decoded piece.
    """

    place: Place
    apart: float
    kept: tuple[int, ...] | None = None

    def __str__(self) -> str:
        module = f" ({self.place.module})" if self.place.module else ""
        return f"{replace(self.place, by_op=False)}{module}"


def first_in_two_texts(
    model: Any,
    runs: tuple[Run, Run],
    size: tuple[int, int],
    split: int,
    noise: float,
) -> Line | None:
    """Return the first line whose value before a split differs, if any.

    Args:
        model: the model, whose module names say where a line runs.
        runs: functions that run two texts, which are equal before the split.
        size: rows and length of each text.
        split: the position before which no value may differ.
        noise: the share of a value up to which differences are rounding.
    """
    part = partial(_before, size=size, split=split)
    kept = values_of_lines(model, runs[0], part)
    differing: dict[Hashable, float] = {}

    def compare(key: Hashable, place: Place, value: Tensor) -> None:
        other = part(value) if key in kept else None
        if other is not None and other.shape == kept[key][1].shape:
            apart, near = distance(kept[key][1], other, noise)
            if not near:
                differing[key] = apart

    visit_lines(model, runs[1], compare)
    for key, (place, _) in kept.items():
        if key in differing:
            return Line(place, differing[key])
    return None


def values_of_lines(
    model: Any, run: Run, part: Callable[[Tensor], Tensor | None]
) -> dict[Hashable, tuple[Place, Tensor]]:
    """Return the lines that a run executes, each with a part of its value."""
    kept: dict[Hashable, tuple[Place, Tensor]] = {}
    count = 0

    def keep(key: Hashable, place: Place, value: Tensor) -> None:
        nonlocal count
        found = part(value)
        if found is not None and found.numel() and count <= NUMBERS_OF_A_RUN:
            kept[key] = place, found.detach().clone()
            count += found.numel()

    visit_lines(model, run, keep)
    return kept


def visit_lines(model: Any, run: Run, visitor: Visitor) -> None:
    """Run a model; call the visitor with each float tensor of its lines."""
    with below_autograd(), operations_through(_Lines(model, visitor)):
        run()


def distance(one: Tensor, other: Tensor, noise: float) -> tuple[float, bool]:
    """Return the distance of two values, and whether it is rounding."""
    apart = float(torch.where(one == other, 0, one - other).abs().max())
    finite = other.abs()[other.isfinite()]
    size = float(finite.max()) if finite.numel() else 0.0
    near = max(torch.finfo(one.dtype).eps ** INSIDE_EXPONENT, noise)
    return apart, apart <= near * size


class _Lines:
    """Calls the visitor with each float tensor that the model's lines compute.

    The key is the line, and how often it has run. For a module of torch, the
    key has the module's name instead of the line, because a model may call the
    module from two lines.
    """

    def __init__(self, model: Any, visitor: Visitor):
        self.layers, self.names = layers_of(model), names_of(model)
        self.torchs = {
            name
            for name, part in getattr(model, "named_modules", dict)()
            if type(part).__module__.startswith("torch.")
        }
        self.visitor = visitor
        self.counts: Counter[Hashable] = Counter()

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and pass its values on."""
        answer = func(*args, **kwargs)
        if is_collective(func):
            finished(func, args, answer)
        if name in UNSET:
            return answer  # the result is uninitialised memory
        for value in filter(is_value, tensors_in((answer,))):
            place, _ = find_call(
                name, self.layers, self.names, code_of(visit_lines)
            )
            if place.in_model:
                line: Hashable = place
                if place.module in self.torchs:
                    line = place.module, name
                self.counts[line] += 1
                self.visitor((line, self.counts[line]), place, value)
        return answer


def is_value(tensor: Tensor) -> bool:
    """Return whether a tensor has several real or complex entries."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return numbers and tensor.numel() > 1


def _before(
    value: Tensor, _: object = None, *, size: tuple[int, int], split: int
) -> Tensor | None:
    """Return a value before a split in time; None if it has no time axis."""
    batch, time = size
    if value.dim() and value.size(0) == batch * time and batch > 1:
        value = value.unflatten(0, size)
    axes = [axis for axis, n in enumerate(value.shape) if n == time]
    if value.shape[-2:] == (time + 1, time):  # relative scores, not yet cut
        return None
    # cut each such axis: in attention scores the keys are positions as well
    for axis in axes:
        value = value.narrow(axis, 0, split)
    return value if axes else None
