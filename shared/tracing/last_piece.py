"""Find the first line that differs when a piece is decoded with a cache.

For the piece, each line must compute the values that the full pass computes at
the same positions.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from torch import Tensor

from ..running.places import Place
from ..running.tolerances import FLOAT32_SHARE
from .lines import Line, Run, distance, values_of_lines, visit_lines

FEWEST_NUMBERS = 4  # fewest different numbers by which a value is recognised


def first_in_last_piece(
    model: Any, piece: Run, whole: Run, ends: tuple[int, int]
) -> Line | None:
    """Return the first line that differs between a piece and the full pass.

    If an earlier line causes the difference, return that line instead: a line
    that only decoding runs, or a line that drops positions.

    Args:
        model: as for first_in_two_texts.
        piece: a function that decodes the last piece with a cache.
        whole: a function that runs the full, uncached pass.
        ends: lengths of the whole text and of the piece.
    """
    kept = values_of_lines(model, piece, lambda value: value)
    found = _PieceLines(kept, ends)
    visit_lines(model, whole, found.compare)
    key, cut = found.first()
    if key is None:
        return None
    line = Line(found.kept[key][0], found.differing[key])
    earlier = found.alone_before(key)
    if cut is not None:
        place, value = found.kept[cut]
        line = replace(line, place=place, kept=found.dropped[cut])
        own = [k for k, v in earlier.items() if _same_numbers(v, value)]
    else:
        long = {k: v for k, v in earlier.items() if ends[0] in v.shape}
        own = _without_counterpart(model, whole, long, FLOAT32_SHARE)
    return replace(line, place=found.kept[own[0]][0]) if own else line


@dataclass
class _PieceLines:
    """The lines of a decoded piece, compared with those of the full pass.

    Attributes:
        kept: the lines of the piece, with their values.
        ends: lengths of the whole text and of the piece.
        alone: values of the lines that the full pass does not run.
        differing: for each line that differs, the largest difference.
        dropped: for each line with values of unequal sizes, what `_dropped`
            returns.
    """

    kept: dict[Hashable, tuple[Place, Tensor]]
    ends: tuple[int, int]
    differing: dict[Hashable, float] = field(default_factory=dict)
    dropped: dict[Hashable, tuple[int, ...] | None] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.alone = {key: value for key, (_, value) in self.kept.items()}

    def compare(self, key: Hashable, place: Place, value: Tensor) -> None:
        """Compare a line of the full pass with the same line of the piece."""
        if key not in self.kept:
            return
        self.alone.pop(key, None)
        one = self.kept[key][1]
        other = _last(value, one, self.ends)
        if other is None or other.shape != one.shape:
            self.dropped[key] = _dropped(value, one)
            return
        apart, near = distance(one, other, FLOAT32_SHARE)
        if not near:
            self.differing[key] = apart

    def first(self) -> tuple[Hashable, Hashable]:
        """Return the first line that differs, and the line that causes this.

        The cause is an earlier line that drops positions, or None. If no line
        differs, both are None.
        """
        before: Hashable = None  # the latest line that the full pass runs too
        fewer: list[Hashable] = []  # lines with only some of the positions
        for key in self.kept:
            if key in self.differing:
                cut = before in self.dropped and fewer
                explained = cut and all(self.dropped[k] for k in fewer)
                return key, fewer[0] if explained else None
            if key not in self.alone:
                before = key
            if self.dropped.get(key) is not None:
                fewer.append(key)
        return None, None

    def alone_before(self, key: Hashable) -> dict[Hashable, Tensor]:
        """Return earlier lines of the same module that only the piece runs."""
        module = self.kept[key][0].module
        return {
            k: self.alone[k]
            for k in takewhile(key.__ne__, self.kept)
            if k in self.alone and self.kept[k][0].module.startswith(module)
        }


def _without_counterpart(
    model: Any, run: Run, values: dict[Hashable, Tensor], noise: float
) -> list[Hashable]:
    """Return the keys of values that a run does not compute."""
    alike, met = set[Hashable](), set[Hashable]()

    def look(_: Hashable, place: Place, value: Tensor) -> None:
        for key, one in values.items():
            if sorted(one.shape) == sorted(value.shape):
                alike.add(key)
                ours, theirs = one.flatten().sort(), value.flatten().sort()
                if distance(ours.values, theirs.values, noise)[1]:
                    met.add(key)

    if values:
        visit_lines(model, run, look)
    return [key for key in values if key in alike - met]


def _dropped(whole: Tensor, piece: Tensor) -> tuple[int, ...] | None:
    """Return how many positions the piece and the whole have.

    Return () if the piece has neither the first nor the last positions of the
    whole, and None if its size does not fit.
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
    """Return whether two values have the same set of numbers."""
    if one.is_complex() or other.is_complex():
        return False
    numbers = one.double().unique()
    same = numbers.equal(other.double().unique())
    return same and len(numbers) >= FEWEST_NUMBERS


def _last(
    whole: Tensor, piece: Tensor, ends: tuple[int, int]
) -> Tensor | None:
    """Cut the whole's value to the piece's positions; None if unknown.

    An axis counts positions if its two sizes are the two lengths in `ends`.
    """
    if whole.dim() != piece.dim():
        return None
    for axis, sizes in enumerate(zip(whole.shape, piece.shape, strict=True)):
        if sizes == ends:
            whole = whole.narrow(axis, ends[0] - ends[1], ends[1])
        elif sizes[0] != sizes[1]:
            return None
    return whole
