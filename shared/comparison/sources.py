"""Pair the source of two styles by concept, component and method."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import combinations, zip_longest
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from ..config import GPTConfig
from ..names import short_name
from ..protocol import Style
from .concepts import CONCEPTS
from .models import stage_modules

# Sizes of a model that any style can build in no time.
TINY = GPTConfig(vocab_size=16, block_size=8, n_layer=1, n_head=2, n_embd=8)


@dataclass(frozen=True)
class Segment:
    """Some lines of source that belong together."""

    key: str  # the method's name, "" for the lines before the first method
    line: int  # number of the first line in its file
    code: str  # the lines, without a final newline


@dataclass(frozen=True)
class Part:
    """A class, function or method that implements a concept."""

    name: str  # qualified name
    file: str  # the file's path, beginning with the top package
    # the source, in pieces; a class is cut at its methods
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class PartPair:
    """Two parts that do the same, or one part without a counterpart.

    The rows are pairs of the parts' segments.
    """

    left: Part | None
    right: Part | None
    rows: tuple[tuple[Segment | None, Segment | None], ...]


def pair_sources(left: Style, right: Style) -> dict[str, list[PartPair]]:
    """Pair the components of two styles, by concept.

    Two components are a pair if both styles declare them as the same stage of
    the model. All other components are paired in reading order.
    """
    stages = (_stage_classes(left), _stage_classes(right))
    found: dict[str, list[PartPair]] = {}
    for concept in concept_names(left, right):
        ours = left.COMPONENTS.get(concept, ())
        theirs = right.COMPONENTS.get(concept, ())
        keys = [
            [stages[side].get(c, (side, n)) for n, c in enumerate(components)]
            for side, components in enumerate((ours, theirs))
        ]
        found[concept] = []
        for pair in align(ours, theirs, keys, _alike):
            parts = [None if c is None else read_part(c) for c in pair]
            left_rows, right_rows = (p.segments if p else () for p in parts)
            # a function may be paired with the forward of a class
            names = [
                ["forward"] if len(rows) == 1 else [row.key for row in rows]
                for rows in (left_rows, right_rows)
            ]
            rows = tuple(align(left_rows, right_rows, names))
            found[concept].append(PartPair(parts[0], parts[1], rows))
    return found


def concept_names(left: Style, right: Style) -> list[str]:
    """Return the concepts of both styles, the six common ones first."""
    both = {**left.COMPONENTS, **right.COMPONENTS}
    return [concept for concept in {**CONCEPTS, **both} if concept in both]


def read_part(component: Any) -> Part:
    """Read the source of a class, function or method."""
    name = getattr(component, "__qualname__", repr(component))
    try:
        lines, line = inspect.getsourcelines(component)
    except (OSError, TypeError) as error:
        raise ValueError(f"no source of {name}: {error}") from None
    path = PurePath(inspect.getsourcefile(component) or "")
    module = short_name(component.__module__)
    folders = module.count(".") + (path.stem == "__init__")
    file = "/".join(path.parts[-1 - folders :])
    code = textwrap.dedent("".join(lines)).rstrip()
    return Part(name, file, tuple(_segments(code, max(line, 1))))


def align(
    left: Sequence[Any],
    right: Sequence[Any],
    keys: Sequence[Sequence[Hashable]],
    alike: Callable[[Any, Any], int] | None = None,
) -> list[tuple[Any, Any]]:
    """Pair the items of two sequences: equal keys first, the rest in order.

    Each item is in one pair, with None if it has no partner. If one sequence
    has more items than the other, `alike` rates how well two items match.
    """
    pairs: list[tuple[Any, Any]] = []
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    for _, a, a_end, b, b_end in matcher.get_opcodes():
        ours, theirs = left[a:a_end], right[b:b_end]
        if alike is not None:
            ours, theirs = _spread(ours, theirs, alike)
        pairs += zip_longest(ours, theirs)
    return pairs


def _spread(
    left: Sequence[Any],
    right: Sequence[Any],
    alike: Callable[[Any, Any], int],
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Put None into the shorter sequence so that the best matches pair up."""
    if len(left) > len(right):
        right, left = _spread(right, left, lambda a, b: alike(b, a))
        return left, right
    places = combinations(range(len(right)), len(left))
    best = max(
        places,
        key=lambda at: sum(
            alike(a, right[i]) for a, i in zip(left, at, strict=True)
        ),
    )
    spread: list[Any] = [None] * len(right)
    for item, i in zip(left, best, strict=True):
        spread[i] = item
    return spread, right


def _alike(one: Any, other: Any) -> int:
    """Return a score for how similar two components' names and kinds are."""
    words = [
        {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
        for name in (one.__qualname__, other.__qualname__)
    ]
    shared = {a for a in words[0] if any(b in a or a in b for b in words[1])}
    return 2 * len(shared) + (type(one) is type(other))


def parts_named(
    sources: Mapping[str, Sequence[PartPair]], word: str
) -> list[PartPair]:
    """Return the pairs in which the name of a part contains a word."""
    return [
        pair
        for pairs in sources.values()
        for pair in pairs
        if any(p and word.lower() in p.name.lower() for p in _parts(pair))
    ]


def _parts(pair: PartPair) -> tuple[Part | None, Part | None]:
    return pair.left, pair.right


def _segments(code: str, line: int) -> list[Segment]:
    """Cut a class at its methods; leave anything else whole."""
    (node,) = ast.parse(code).body
    if not isinstance(node, ast.ClassDef):
        return [Segment("", line, code)]
    starts = {1: ""}
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [d.lineno for d in child.decorator_list]
            starts[min([child.lineno, *decorators])] = child.name
    lines = code.split("\n")
    ends = [*list(starts)[1:], len(lines) + 1]
    return [
        Segment(
            key,
            line + start - 1,
            "\n".join(lines[start - 1 : end - 1]).rstrip(),
        )
        for (start, key), end in zip(starts.items(), ends, strict=True)
    ]


def _stage_classes(style: Style) -> dict[object, str]:
    """Return the names of a model's stages, by the class of each stage."""
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = style.build_model(TINY)
    found: dict[object, str] = {type(model): "model"}
    for stage, module in stage_modules(model, style.STAGES).items():
        found.setdefault(type(module), stage)
    return found
