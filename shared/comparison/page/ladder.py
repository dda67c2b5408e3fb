"""The page of the ladder: what each model adds to the one below it."""

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
    """A rung after its training."""

    name: str  # of the part that the rung adds
    kind: type  # its class
    parameters: int  # how many it has
    curve: Sequence[tuple[float, float]]  # (step, validation loss) points
    seconds: float  # that it took
    sample: str  # text that it wrote

    @property
    def loss(self) -> float:
        """The last validation loss."""
        return self.curve[-1][1]


def render_ladder(rungs: Sequence[Climbed], facts: Mapping[str, str]) -> str:
    """Return the page of some rungs, from the lowest to the highest."""
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
    """Return for each class the lines that a lecture would write down.

    First the parts that the class uses and none below it, then the class;
    each line with whether the class below has none like it.
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
    """Return what of its package a class names, each part before its user."""
    home = kind.__module__.rpartition(".")[0]
    functions = (f for f in vars(kind).values() if inspect.isfunction(f))
    parts = []
    for name in (n for f in functions for n in _names(f.__code__)):
        part = getattr(sys.modules[kind.__module__], name, None)
        if getattr(part, "__module__", "").rpartition(".")[0] == home:
            parts += [*(_parts(part) if inspect.isclass(part) else ()), part]
    return parts


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function, and in the comprehensions inside."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _lines(part: Any) -> list[Line]:
    source, first = inspect.getsourcelines(part)
    lines = fold("".join(source), first, {})
    return [line for line in lines if line.kind != "fold" and line.code]
