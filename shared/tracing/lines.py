"""The first line of a model whose value differs between two runs.

The finder compares two texts that are equal before a split: no value before
the split may differ. It also compares a piece decoded with a cache with the
full pass: the piece's values must be the last positions of the full ones.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
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
from ..running.tolerances import FLOAT32_SHARE, INSIDE_EXPONENT

FEWEST_NUMBERS = 4  # numbers that a value is known by
NUMBERS_OF_A_RUN = 2**27  # that are kept: later lines are not compared

Run = Callable[[], object]


@dataclass(frozen=True)
class Line:
    """A line whose value differs between two runs.

    Attributes:
        place: the line.
        apart: the largest difference of its value.
        kept: how many positions a piece keeps, and how many there are, where
            it keeps fewer.
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
        model: whose modules' names say where a line runs.
        runs: of the two texts, which are equal before the split.
        size: rows and length of each text.
        split: the position up to which no value may differ.
        noise: share of a value that passes as rounding.
    """
    part = partial(_before, size=size, split=split)
    return _first_line(model, runs, part, noise)


def first_in_last_piece(
    model: Any, piece: Run, whole: Run, ends: tuple[int, int]
) -> Line | None:
    """Return the first line of a piece that differs from the full pass.

    It is a line that only decoding runs where the value comes from it as is,
    or where it drops positions that the full pass has.

    Args:
        model: as for first_in_two_texts.
        piece: decodes the last piece with a cache.
        whole: the full pass.
        ends: lengths of the whole and of the piece.
    """
    part = partial(_last, ends=ends)
    return _first_line(model, (piece, whole), part, FLOAT32_SHARE, ends[0])


def _first_line(
    model: Any,
    runs: tuple[Run, Run],
    part: Callable[..., Tensor | None],
    noise: float,
    length: int = 0,
) -> Line | None:
    """Return the first line of the first run whose value differs.

    Compared are the parts of a first value, and of a second one next to it. In
    its place stands a line of the first run alone: one that no value of the
    second run equals, though some have its size, the length among its axes.
    """
    kept: dict[Hashable, tuple[Place, Tensor]] = {}
    differing: dict[Hashable, float] = {}
    alone = dict[Hashable, Tensor]()  # what the second run never computes
    dropped: dict[Hashable, tuple[int, ...] | None] = {}  # of other sizes
    count = 0

    def keep(key: Hashable, place: Place, value: Tensor) -> None:
        nonlocal count
        found = part(value)
        if found is not None and found.numel() and count <= NUMBERS_OF_A_RUN:
            kept[key] = place, found.detach().clone()
            alone[key] = kept[key][1]
            count += found.numel()

    def compare(key: Hashable, place: Place, value: Tensor) -> None:
        if key not in kept:
            return
        alone.pop(key, None)
        one = kept[key][1]
        other = part(value, one)
        if other is not None and other.shape == one.shape:
            apart, near = _apart(one, other, noise)
            if not near:
                differing[key] = apart
        else:
            dropped[key] = _dropped(value, one)

    for run, visitor in zip(runs, (keep, compare), strict=True):
        with below_autograd(), operations_through(_Lines(model, visitor)):
            run()
    before: Hashable = None
    fewer: list[Hashable] = []
    for key, (place, value) in kept.items():
        if key in differing:
            found = Line(place, differing[key])
            earlier = [
                k
                for k in takewhile(key.__ne__, kept)
                if k in alone and kept[k][0].module.startswith(place.module)
            ]
            if before in dropped and fewer and all(dropped[k] for k in fewer):
                place, value = kept[fewer[0]]
                found = Line(place, found.apart, dropped[fewer[0]])
                own = [k for k in earlier if _same_numbers(alone[k], value)]
            else:
                long = {
                    k: alone[k] for k in earlier if length in alone[k].shape
                }
                own = _without_counterpart(model, runs[1], long, noise)
            return replace(found, place=kept[own[0]][0]) if own else found
        before = before if key in alone else key
        fewer += [key] * (key in dropped and dropped[key] is not None)
    return None


def _apart(one: Tensor, other: Tensor, noise: float) -> tuple[float, bool]:
    """Return how far two values are apart, and whether that is rounding."""
    apart = float(torch.where(one == other, 0, one - other).abs().max())
    finite = other.abs()[other.isfinite()]
    size = float(finite.max()) if finite.numel() else 0.0
    near = max(torch.finfo(one.dtype).eps ** INSIDE_EXPONENT, noise)
    return apart, apart <= near * size


def _without_counterpart(
    model: Any, run: Run, values: dict[Hashable, Tensor], noise: float
) -> list[Hashable]:
    """Return which values equal none of a run, where some have their size."""
    alike, met = set[Hashable](), set[Hashable]()

    def look(_: Hashable, place: Place, value: Tensor) -> None:
        for key, one in values.items():
            if sorted(one.shape) == sorted(value.shape):
                alike.add(key)
                ours, theirs = one.flatten().sort(), value.flatten().sort()
                if _apart(ours.values, theirs.values, noise)[1]:
                    met.add(key)

    if values:
        with below_autograd(), operations_through(_Lines(model, look)):
            run()
    return [key for key in values if key in alike - met]


def _dropped(whole: Tensor, piece: Tensor) -> tuple[int, ...] | None:
    """Return how many positions a piece has, and the whole, if it has fewer.

    These are the last or the first of the whole's, else (); None for other
    sizes.
    """
    if whole.dim() != piece.dim():
        return None
    axes = [d for d, n in enumerate(piece.shape) if n != whole.size(d)]
    if len(axes) != 1:
        return None
    end, size = whole.size(axes[0]), piece.size(axes[0])
    near = FLOAT32_SHARE * float(piece.abs().max())
    if size > end:
        return None
    for start in (end - size, 0):
        part = whole.narrow(axes[0], start, size)
        if bool((part - piece).abs().max() <= near):
            return size, end
    return ()


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two values have the same numbers, each as often as it may."""
    if one.is_complex() or other.is_complex():
        return False
    numbers = one.double().unique()
    same = numbers.equal(other.double().unique())
    return same and len(numbers) >= FEWEST_NUMBERS


class _Lines:
    """Hands out each floating value of the model's lines as it is computed.

    The key is the line and how often it ran; for a module of torch's the
    module instead of the line, as a model may call it from two lines.
    """

    def __init__(
        self, model: Any, visitor: Callable[[Hashable, Place, Tensor], None]
    ):
        self.layers, self.names = layers_of(model), names_of(model)
        self.torchs = {
            name
            for name, part in getattr(model, "named_modules", dict)()
            if type(part).__module__.startswith("torch.")
        }
        self.visitor = visitor
        self.counts: Counter[Hashable] = Counter()

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and hand its values out."""
        answer = func(*args, **kwargs)
        if is_collective(func):
            finished(func, args, answer)
        if name in UNSET:
            return answer  # what the memory held
        for value in filter(is_value, tensors_in((answer,))):
            place, _ = find_call(
                name, self.layers, self.names, code_of(_first_line)
            )
            if place.in_model:
                line: Hashable = place
                if place.module in self.torchs:
                    line = place.module, name
                self.counts[line] += 1
                self.visitor((line, self.counts[line]), place, value)
        return answer


def is_value(tensor: Tensor) -> bool:
    """Whether a tensor holds enough numbers to identify it."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return numbers and tensor.numel() > 1


def _before(
    value: Tensor, _: object = None, *, size: tuple[int, int], split: int
) -> Tensor | None:
    """Return the positions before a split, None for a value without time."""
    batch, time = size
    if value.dim() and value.size(0) == batch * time and batch > 1:
        value = value.unflatten(0, size)
    axes = [axis for axis, n in enumerate(value.shape) if n == time]
    if value.shape[-2:] == (time + 1, time):  # distances of keys, skewed
        return None
    # of scores of attention the keys are positions as well
    for axis in axes:
        value = value.narrow(axis, 0, split)
    return value if axes else None


def _last(
    whole: Tensor, like: Tensor | None = None, *, ends: tuple[int, int]
) -> Tensor | None:
    """Return the last positions of a value, or None where they are not seen.

    Like is the value of a piece: its axes of another size are time.
    """
    if like is None:
        return whole
    if whole.dim() != like.dim():
        return None
    for axis, sizes in enumerate(zip(whole.shape, like.shape, strict=True)):
        if sizes == ends:
            whole = whole.narrow(axis, ends[0] - ends[1], ends[1])
        elif sizes[0] != sizes[1]:
            return None
    return whole
