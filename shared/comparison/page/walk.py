"""Show one forward pass step by step: lines, sources and maps of values.

The texts of the steps are in files/step_texts.html. The texts about the lines
of a style are in glossaries/.
"""

import ast
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from string import ascii_lowercase
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ...importing import held_by
from ...validation import dtype_name
from ..values import Place, ValueDiff
from ..values.rows import Row, Section
from ..values.side import Side
from .folding import fold
from .glossaries import text_of
from .kinds import GROUPS, SQUARE, name_axes, name_kinds
from .value_maps import Factors, ValueMaps, find_factors

MAP_POSITIONS = 32  # a map shows this many positions from the start
MAPS = 200  # most maps of one side; later layers are left out
LIKELIEST = 20  # next tokens that the page shows
# a model with more parameters gets no steps, because they would take too long
WALK_PARAMETERS = 20_000_000
CURVES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ReLU": F.relu,
    "GELU": F.gelu,
    "GELU by tanh": partial(F.gelu, approximate="tanh"),
}
HEATS = 20  # number of temperatures to choose from: 0.1, 0.2, ...

# sources by file and first line
Sources = dict[tuple[str, int], dict[str, Any]]


@dataclass
class Step:
    """A step of the page, with the hidden steps before it."""

    row: Row  # the row of the first layer with this step
    section: Section
    title: str  # title of the section (which layers it covers)
    name: str  # the step's number, with a letter if the step is folded
    folded: "list[Step]"
    kind: str = ""  # kind of the step's value, see kinds.py
    group: str = ""  # the part of the model, if known
    axes: str = ""  # the names of the shape's axes, if known
    why: str = ""  # a name for the step if its kind is not known
    # for each side, a sentence on how it writes the step
    remarks: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Layout:
    """The steps of a forward pass; each has a row for every layer.

    A layout is made once, from two sides that ran one text. For any text,
    `data_of(layout, run, ...)` then returns the data of the page.
    """

    found: ValueDiff
    steps: Sequence[Step]
    every: Sequence[Step]  # all steps in order, also folded ones
    rows: Sequence[Sequence[Row]]  # rows of each of these steps, by layer
    # for each step and side: the source, and its lines
    places: Sequence[list[list[int] | None]]
    sources: tuple[Sources, Sources]  # the functions that contain the lines

    def wanted(self, side: int) -> set[int]:
        """Return the numbers of one side's values that the page shows."""
        numbers = {row.order[side] for rows in self.rows for row in rows}
        return numbers - {-1} | {self.found.sides[side].normalised}

    def scores(self, side: int) -> set[int]:
        """Return the value numbers of one side's attention scores."""
        return {
            row.order[side]
            for step, rows in zip(self.every, self.rows, strict=True)
            for row in rows
            if step.kind == "scores"
        }


@dataclass(frozen=True)
class Run:
    """The values that both models computed for one text."""

    tokens: Sequence[int]
    texts: Sequence[str]  # texts of the shown tokens
    values: Sequence[Mapping[int, Tensor]]  # values of each side, by number
    factors: Sequence[Mapping[int, Factors]]  # query and key of the scores
    # whether the page shows the differences of these values, and not those on
    # the text of the layout
    measured: bool = False


def lay_out(
    found: ValueDiff,
) -> tuple[Layout, list[dict[int, Tensor]]]:
    """Return the steps of two models, and each model's value at each step.

    Both models run again to compute the values.
    """
    steps = fold_steps(found)
    every = [each for step in steps for each in (step, *step.folded)]
    layers = max(1, MAPS // len(every))
    rows = [
        [
            by_layer[step.section.rows.index(step.row)]
            for by_layer in step.section.rows_by_layer[:layers]
        ]
        for step in every
    ]
    sources: tuple[Sources, Sources] = ({}, {})
    places = [
        [*map(_find, sources, (step.row.left, step.row.right))]
        for step in every
    ]
    layout = Layout(found, steps, every, rows, places, sources)
    values = [s.keep(layout.wanted(i)) for i, s in enumerate(found.sides)]
    _add_kinds(steps, values[0], found.sides[0], found.parted)
    return layout, values


def make_walk(
    found: ValueDiff, text_of: Callable[[int], str]
) -> dict[str, Any]:
    """Run two models again, and return the steps of their forward passes.

    The result is for the template. It has the steps, the functions of each
    model that contain them, and the data for the page's script.
    """
    layout, values = lay_out(found)
    tokens = found.sides[0].tokens[0].tolist()
    time = min(MAP_POSITIONS, len(tokens))
    factors = [
        find_factors(side, {n: kept[n] for n in layout.scores(i)})
        for i, (side, kept) in enumerate(zip(found.sides, values, strict=True))
    ]
    texts = [text_of(token) for token in tokens[:time]]
    run = Run(tokens, texts, values, factors)
    maps = ValueMaps(time, len(tokens))
    following = None
    if found.same and len(tokens) > 1:
        log_probs = values[0][found.sides[0].normalised]
        following = next_tokens(log_probs, tokens, time)
    return described(layout, values[0]) | {
        "tokens": texts,
        "data": data_of(layout, run, maps, following, text_of),
    }


def described(layout: Layout, values: Mapping[int, Tensor]) -> dict[str, Any]:
    """Return the part of the steps' data that does not depend on the text."""
    side = layout.found.sides[0]
    count = side.tokens.size(1)
    return {
        "found": layout.found,
        "run": f"on {count} tokens in {dtype_name(side.dtype)}",
        "steps": layout.steps,
        "boxes": _boxes(layout.steps),
        "curves": _curves(layout.every, values),
        "sources": [list(side.values()) for side in layout.sources],
    }


def data_of(
    layout: Layout,
    run: Run,
    maps: ValueMaps,
    following: dict[str, Any] | None,
    text_of: Callable[[int], str],
) -> dict[str, Any]:
    """Return the data of one text for the page's script."""
    every = zip(layout.every, layout.rows, layout.places, strict=True)
    named = {i for row in (following or {"rows": []})["rows"] for i, _ in row}
    steps = [
        _step_data(step, rows, places, run, maps)
        for step, rows, places in every
    ]
    for step, rows in zip(steps, layout.rows, strict=True):
        step["factors"] = [*_factors(step, rows, run, maps)]
    return {
        "steps": steps,
        "opens": next(
            (
                i
                for i, step in enumerate(layout.every)
                if step.row is layout.found.parted
            ),
            0,
        ),
        "columns": maps.columns,
        "dtype": dtype_name(layout.found.sides[0].dtype),
        "maps": maps.found,
        "following": following,
        "others": {},
        "tokens": run.texts,
        "pieces": {token: text_of(token) for token in named},
    }


def _step_data(
    step: Step,
    rows: Sequence[Row],
    places: list[list[int] | None],
    run: Run,
    maps: ValueMaps,
) -> dict[str, Any]:
    """Return a step's lines, and the indices of its maps in each layer."""
    compared = []
    for row in rows:
        both = zip(run.values, row.order, strict=True)
        left, right = (kept.get(number) for kept, number in both)
        compared.append(maps.compare(left, right, step.kind in SQUARE))
    apart = [row.difference for row in rows]
    if run.measured:
        apart = [
            None if size is None or not isfinite(size) else size
            for _, size in compared
        ]
    return {
        "name": step.name,
        "kind": step.kind,
        "layers": step.section.layers[: len(rows)],
        "apart": apart,
        "maps": [numbers for numbers, _ in compared],
        "places": places,
    }


def _factors(
    step: Mapping[str, Any],
    rows: Sequence[Row],
    run: Run,
    maps: ValueMaps,
) -> Iterator[list[Any]]:
    """Yield, for each layer, the query and key of a step with scores."""
    if step["kind"] != "scores":
        return
    for shown, row in zip(step["maps"], rows, strict=True):
        both = zip(run.factors, row.order, strict=True)
        found = [known.get(number) for known, number in both]
        yield maps.factors(found, shown[0] == shown[1])


def fold_steps(found: ValueDiff) -> list[Step]:
    """Return the steps of both models, in order.

    A step that only one model has is folded into the next common step. If the
    models differ, the first step that differs comes last.
    """
    sections = [(section, section.title) for section in found.sections()]
    if found.parted is not None:
        parting = Section((), [[found.parted]])
        sections.append((parting, "where they first differ"))
    steps: list[Step] = []
    lead: list[Step] = []
    for section, title in sections:
        for row in section.rows:
            step = Step(row, section, title, "", [])
            if None in (row.left, row.right):
                lead.append(step)
                continue
            step.why = title if row is found.parted else ""
            step.folded, lead = lead, []
            steps.append(step)
    steps[-1].folded += lead
    for number, step in enumerate(steps, 1):
        step.name = str(number)
        for letter, each in zip(ascii_lowercase, step.folded, strict=False):
            each.name = f"{number}{letter}"
    return steps


def _add_kinds(
    steps: Sequence[Step],
    values: Mapping[int, Tensor],
    left: Side,
    parted: Row | None,
) -> None:
    """Set the kind of each step, and how each side writes the step."""
    time = left.tokens.size(-1)
    known = [step for step in steps if step.row is not parted]
    rows = [step.row for step in known]
    kinds = name_kinds(rows, values, left)
    for step, kind in zip(known, kinds, strict=True):
        step.kind = kind
        name = "norm" if kind == "second_norm" else kind
        step.axes = name_axes(kind, step.row.shape, time)
        if kind == "position":
            first = values[step.row.order[0]].flatten()[:2].tolist()
            name = "position" if first == [0, 1] else "learned_position"
        ours, theirs = (
            (texts := text_of(_package(place), "STEPS")).get(name)
            or texts.get(kind, "")
            for place in (step.row.left, step.row.right)
        )
        step.remarks = ours, theirs
    group = ""
    for step in reversed(known):
        step.group = group = GROUPS.get(step.kind, group)


def _package(place: Place | None) -> ModuleType | None:
    """Return the package that has a place's file, if it is imported."""
    if place is None:
        return None
    init = str(Path(place.path).with_name("__init__.py"))
    loaded = list(sys.modules.values())
    return next((m for m in loaded if held_by(m, "__file__") == init), None)


def _find(sources: Sources, place: Place | None) -> list[int] | None:
    """Return the index of a place's source, and its first and last line.

    A source is the function that contains the place's first and last line. If
    `sources` lacks that function, it is added there.
    """
    if place is None:
        return None
    lines = linecache.getlines(place.path)
    around = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= place.line <= (node.end_lineno or 0)
    ]
    first, last = max(around, default=(place.line, place.line))
    key = place.path, first
    if key not in sources:
        sources[key] = {
            "title": f"{place.file}, {without_inner(place.function)}",
            "lines": fold("".join(lines[first - 1 : last]), first, {}),
        }
    last = max(place.line, place.span[2])
    return [list(sources).index(key), place.line, last]


def _boxes(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return the parts of the model in order, with the steps of each.

    A part's name is the class and function that contain its lines.
    """
    boxes: list[dict[str, Any]] = []
    for step in steps:
        if not step.group:
            continue
        layer = step.title.partition("; ")[0]
        if not boxes or boxes[-1]["key"] != (layer, step.group):
            boxes.append({"key": (layer, step.group), "names": ({}, {})})
            boxes[-1] |= {"layer": layer, "group": step.group, "steps": []}
        box = boxes[-1]
        box["steps"].append(step)
        for names, place in zip(
            box["names"], (step.row.left, step.row.right), strict=True
        ):
            if place is not None:
                name = without_inner(place.function)
                names[name.partition(".forward")[0]] = None
    return boxes


def without_inner(function: str) -> str:
    """Return a function's name, without that of a comprehension inside it.

    Before Python 3.12 a comprehension is a separate function.
    """
    return re.sub(r"\.<(list|dict|set)comp>|\.<genexpr>", "", function)


def _curves(
    steps: Sequence[Step], values: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Return the curves of three activations, and which the model uses."""
    x = torch.linspace(-4, 4, 161, dtype=torch.float64)
    points = {
        name: " ".join(
            f"{a:.2f},{-b:.3f}"
            for a, b in zip(x.tolist(), curve(x).tolist(), strict=True)
        )
        for name, curve in CURVES.items()
    }
    number = {step.kind: step.row.order[0] for step in reversed(steps)}
    ran = ""
    if {"widen", "activation"} <= number.keys():
        wide, active = (values[number[k]] for k in ("widen", "activation"))
        for name, curve in CURVES.items():
            if wide.shape == active.shape and curve(wide).allclose(
                active, atol=1e-6
            ):
                ran = name
    return {"points": points, "ran": ran}


def next_tokens(
    log_probs: Float[Tensor, "... vocab"], tokens: Sequence[int], time: int
) -> dict[str, Any]:
    """Return, for each position, the likeliest next ids and the actual id.

    "rows" has the likeliest ids with their log-probabilities, and last the
    actual next id. "rests" has, for each temperature, the logarithm of the
    total weight of all other ids.
    """
    all_rows = log_probs.reshape(-1, log_probs.size(-1))[:time].double()
    # JSON has no infinity; a token at -1e4 is never drawn either
    all_rows = all_rows.nan_to_num(-1e4).clamp(min=-1e4)
    heats = torch.arange(1, HEATS + 1) / 10
    rows, rests = [], []
    for position, scores in enumerate(all_rows):
        ids = scores.topk(min(LIKELIEST, len(scores))).indices.tolist()
        actual = tokens[position + 1 : position + 2]
        rows.append([[i, round(scores[i].item(), 4)] for i in ids + actual])
        others = scores.clone()
        others[ids] = -torch.inf
        rest = (others / heats[:, None]).logsumexp(-1).clamp(min=-1e4)
        rests.append([round(number, 4) for number in rest.tolist()])
    return {
        "rows": rows,
        "rests": rests,
        "drawn": min(LIKELIEST, log_probs.size(-1)),
        "others": max(0, log_probs.size(-1) - LIKELIEST),
    }
