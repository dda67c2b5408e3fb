"""Find texts that take different paths through a model's code.

A proof may hold only for the path of one text. Then later tokens may still
choose the path of earlier tokens. A branch may also depend on a weight, such
as a gate: while the gate is closed, all texts take one path. So the search
changes one parameter at a time until the path of a text changes. Then it
bisects to the point where the gate begins to open, because there some texts
take one path and some the other.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..running.errors import ModelRaised
from ..running.operations import is_plain, operations_through
from ..running.places import Place, find_place
from ..running.ranks import current, local
from ..running.subject import Subject
from ..running.tokens import SHORT, draw, others
from ..running.variant import CopyFailed, Variant, copy_for, larger
from ..running.ways import DOUBLE, ENLARGED

PARAMETERS = 48  # most parameters to change, the smallest first
HEAVY_PARAMETERS = 8  # most parameters to change in a heavy model
FACTORS = -1.0, 0.0, 30.0  # factors by which a parameter is multiplied
SMALLEST = 1e-6  # smallest factor that does not count as 0
HALVINGS = 16
TEXTS = 8  # number of texts, which differ in their last tokens
PAIRS = 2  # most pairs of texts with one set of weights
CROSSINGS = 8  # crossings after which the search ends
READ_BY_PYTHON = "_local_scalar_dense", "equal"


class Path:
    """The operations of a call, with result shapes and numeric arguments.

    If both branches of a decision run the same operations, paths are equal.
    """

    def __init__(self) -> None:
        """Begin a path that has no steps yet."""
        self.steps: list[tuple[Any, ...]] = []
        self.reads: list[tuple[int, Place]] = []  # next step's index; the line

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation and record it."""
        result = func(*args, **kwargs)
        if name in READ_BY_PYTHON:
            self.reads.append((len(self.steps), find_place(name)))
        numbers = [a for a in args if isinstance(a, bool | int | float)]
        shape = tuple(getattr(result, "shape", ()))
        self.steps.append((name, *numbers, shape))
        return result

    def __eq__(self, other: object) -> bool:
        """Return whether both paths have the same steps."""
        return isinstance(other, Path) and self.steps == other.steps

    __hash__ = None  # type: ignore[assignment]

    def fork(self, other: "Path") -> Place | None:
        """Return the last line that reads a tensor before the paths differ."""
        pairs = zip(self.steps, other.steps, strict=False)
        same = [one == another for one, another in pairs]
        end = same.index(False) if False in same else len(same)
        places = [place for step, place in self.reads if step < end]
        return places[-1] if places else None


@dataclass(frozen=True)
class Crossing:
    """Two texts that begin equally but take different paths."""

    variant: Variant
    base: Int[Tensor, "1 time"]
    changed: Int[Tensor, "1 time"]
    split: int  # position of the first token that differs
    fork: Place | None  # the line that read a tensor before the paths differ


def crossings(subject: Subject) -> Iterator[Crossing]:
    """Yield pairs of texts that take different paths, if any.

    A pair may need changed weights. The copy of the model keeps these until
    the next pair is requested.
    """
    if not subject.is_module or current() is not None:
        return
    search = _Search(subject)
    copies = copy_for(subject, DOUBLE), larger(subject, ENLARGED[0], SHORT)
    found = chain.from_iterable(search.of(c) for c in copies if c is not None)
    yield from islice(found, CROSSINGS)


class _Search:
    """Searches for weights with which texts take different paths."""

    def __init__(self, subject: Subject):
        self.generator = subject.generator()
        vocab, time = subject.vocab_size, subject.lengths.fit(SHORT // 2)
        self.most = HEAVY_PARAMETERS if subject.heavy else PARAMETERS
        self.base = draw(vocab, 1, time, self.generator)
        self.changed: list[tuple[int, Tensor]] = []
        for row in range(TEXTS if time > 1 else 0):
            split, other = 1 + row % (time - 1), self.base.clone()
            rest = other[:, split:]
            other[:, split:] = others(rest, vocab, self.generator)
            self.changed.append((split, other))

    def of(self, variant: Variant) -> Iterator[Crossing]:
        """Yield a copy's Crossings, with at most one parameter changed."""
        variant.copy.may_fail = True
        usual = _path(variant, self.base)
        if usual is None:
            return
        as_it_is = [*self._pairs(variant)]
        yield from as_it_is
        if as_it_is:
            return
        named = [
            (name, weight)
            for name, weight in variant.model.named_parameters()
            if is_plain(type(local(weight))) and weight.is_floating_point()
        ]
        named.sort(key=lambda pair: pair[1].numel())
        for name, weight in named[: self.most]:
            before = weight.detach().clone()
            try:
                yield from self._by(variant, name, weight, usual)
            finally:
                weight.data.copy_(before)

    def _by(
        self, variant: Variant, name: str, weight: nn.Parameter, usual: Path
    ) -> Iterator[Crossing]:
        """Yield texts whose paths differ after a change of one parameter."""
        unit, first = weight.detach().clone(), 1.0
        if not bool(unit.any()):
            drawn = torch.randn(unit.shape, generator=self.generator)
            unit, first, name = drawn.to(unit), 0.0, f"random {name}"

        def takes(factor: float) -> bool:
            """Return whether the text takes the usual path, or cannot run."""
            weight.data.copy_(factor * unit)
            path = _path(variant, self.base)
            return path is None or path == usual

        for last in FACTORS:
            if takes(last):
                continue
            low, high = first, last
            for _ in range(HALVINGS):
                middle = _between(low, high)
                low, high = (middle, high) if takes(middle) else (low, middle)
            for factor in (low, high):
                weight.data.copy_(factor * unit)
                words = f"{name} times {factor:.3g}"
                case = replace(variant.case, changed=words)
                found = [*self._pairs(replace(variant, case=case))]
                yield from found
                if found:
                    return

    def _pairs(self, variant: Variant) -> Iterator[Crossing]:
        """Yield pairs of the base text with texts that take other paths."""
        usual, found = _path(variant, self.base), 0
        for split, other in self.changed:
            path = _path(variant, other)
            if path is None or usual is None or path == usual:
                continue
            fork = usual.fork(path)
            yield Crossing(variant, self.base, other, split, fork)
            found += 1
            if found >= PAIRS:
                return


def _between(low: float, high: float) -> float:
    """Return the factors' geometric mean; 1e-6 and less count as 0."""
    ends = [math.asinh(factor / SMALLEST) for factor in (low, high)]
    return SMALLEST * math.sinh(sum(ends) / 2)


def _path(variant: Variant, tokens: Int[Tensor, "1 time"]) -> Path | None:
    """Return the path of a text, None if it cannot be run."""
    with suppress(CopyFailed, ModelRaised):
        with operations_through(Path()) as path:
            variant.scores(tokens)
        return path
    return None
