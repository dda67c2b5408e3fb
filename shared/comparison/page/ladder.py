"""Render the page of the ladder: what each model adds to the previous one."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import CodeType
from typing import Any

from .folding import Line, fold
from .render import fill


@dataclass(frozen=True)
class Climbed:
    """One model of the ladder (a rung), after its training."""

    name: str  # name of the part that the rung adds
    kind: type  # the class that implements the part
    parameters: int  # number of the model's parameters
    curve: Sequence[tuple[float, float]]  # (step, validation loss) points
    seconds: float  # seconds that training took
    sample: str  # a text that the model generated

    @property
    def loss(self) -> float:
        """Return the last validation loss."""
        return self.curve[-1][1]


def render_ladder(rungs: Sequence[Climbed], facts: Mapping[str, str]) -> str:
    """Return the page for these rungs, the first of which is the lowest."""
    losses = [loss for rung in rungs for _, loss in rung.curve]
    steps = max(step for rung in rungs for step, _ in rung.curve)
    return fill(
        "ladder.html",
        [],
        rungs=rungs,
        code=new_code([rung.kind for rung in rungs]),
        lines=[inspect.getdoc(rung.kind) or "" for rung in rungs],
        facts=facts,
        least=min(losses),
        most=max(losses),
        steps=steps,
        data={},
    )


def new_code(kinds: Sequence[type]) -> list[list[list[tuple[Line, bool]]]]:
    """Return the code of each class, and which of its lines are new.

    For each class, the parts that no earlier class uses come first, then the
    class itself. Each line comes with a bool: whether it is new.
    """
    shown, below = set[Any](), list[str]()
    found = []
    for kind in kinds:
        parts = [p for p in dict.fromkeys(_parts(kind)) if p not in shown]
        shown.update(parts)
        pieces = [[(line, True) for line in _lines(part)] for part in parts]
        lines = _lines(kind)
        texts = [str(line.code.striptags()) for line in lines]
        matcher = SequenceMatcher(None, below, texts, autojunk=False)
        old = {
            match.b + i
            for match in matcher.get_matching_blocks()
            for i in range(match.size)
        }
        pieces.append([(line, i not in old) for i, line in enumerate(lines)])
        below = texts
        found.append(pieces)
    return found


def _parts(kind: type) -> list[Any]:
    """Return what a class uses from its package, the innermost parts first."""
    home = kind.__module__.rpartition(".")[0]
    functions = (f for f in vars(kind).values() if inspect.isfunction(f))
    parts = []
    for name in (n for f in functions for n in _names(f.__code__)):
        part = getattr(sys.modules[kind.__module__], name, None)
        if getattr(part, "__module__", "").rpartition(".")[0] == home:
            parts += [*(_parts(part) if inspect.isclass(part) else ()), part]
    return parts


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function and in its comprehensions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _lines(part: Any) -> list[Line]:
    source, first = inspect.getsourcelines(part)
    lines = fold("".join(source), first, {})
    return [line for line in lines if line.kind != "fold" and line.code]
