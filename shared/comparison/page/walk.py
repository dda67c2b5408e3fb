"""One forward pass step by step: lines, sources, and maps of the values."""

import ast
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from .value_maps import ValueMaps, find_factors

MAP_POSITIONS = 32  # positions on a map: the first ones
MAPS = 200  # of one side; further layers are left out
LIKELIEST = 20  # next tokens that are drawn
CURVES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ReLU": F.relu,
    "GELU": F.gelu,
    "GELU by tanh": partial(F.gelu, approximate="tanh"),
}
HEATS = 20  # temperatures to choose from, a tenth apart

Sources = dict[tuple[str, int], dict[str, Any]]  # by file and first line


@dataclass
class Step:
    """A step that the page shows, with those of one side that lead to it."""

    row: Row  # that of the first of its layers
    section: Section
    title: str  # of the section
    name: str  # its number, with a letter where it is folded
    folded: "list[Step]"
    kind: str = ""  # of its value, see kinds.py
    group: str = ""  # the part of the model, where it is known
    axes: str = ""  # the names of the shape's axes, where known
    why: str = ""  # what to call it where no kind is known
    remarks: tuple[str, str] = ("", "")  # how each side writes it


def make_walk(
    found: ValueDiff, text_of: Callable[[int], str]
) -> dict[str, Any]:
    """Run both sides again for their values, and lay the steps out.

    Returns what the template needs: the steps, for each side the functions
    that they are in, and the data that the script reads.
    """
    sides = found.sides
    tokens = sides[0].tokens[0].tolist()
    steps = fold_steps(found)
    every = [each for step in steps for each in (step, *step.folded)]
    layers = max(1, MAPS // len(every))
    versions = [
        [
            rows[step.section.rows.index(step.row)]
            for rows in step.section.rows_by_layer[:layers]
        ]
        for step in every
    ]
    values = [
        side.keep(
            {row.order[i] for rows in versions for row in rows} - {-1}
            | {side.normalised}
        )
        for i, side in enumerate(sides)
    ]
    _add_kinds(steps, values[0], sides[0], found.parted)
    time = min(MAP_POSITIONS, len(tokens))
    maps = ValueMaps(time, len(tokens))
    sources: tuple[Sources, Sources] = ({}, {})
    scores = {
        row.order
        for step, rows in zip(every, versions, strict=True)
        for row in rows
        if step.kind == "scores"
    }
    factors = [
        find_factors(side, {n: values[i][n] for n in {o[i] for o in scores}})
        for i, side in enumerate(sides)
    ]
    data: list[dict[str, Any]] = [
        {
            "name": step.name,
            "kind": step.kind,
            "layers": step.section.layers[:layers],
            "apart": [row.difference for row in rows],
            "maps": [
                maps.numbers(
                    values[0].get(row.order[0]),
                    values[1].get(row.order[1]),
                    step.kind in SQUARE,
                )
                for row in rows
            ],
            "places": [*map(_find, sources, (step.row.left, step.row.right))],
        }
        for step, rows in zip(every, versions, strict=True)
    ]
    for step, rows in zip(data, versions, strict=True):
        step["factors"] = [
            maps.factors(
                [f.get(n) for f, n in zip(factors, row.order, strict=True)],
                shown[0] == shown[1],
            )
            for shown, row in zip(step["maps"], rows, strict=True)
            if row.order in scores
        ]
    following = None
    named = set[int]()
    if found.same and len(tokens) > 1:
        following = next_tokens(values[0][sides[0].normalised], tokens, time)
        named = {id for row in following["rows"] for id, _ in row}
    texts = [text_of(token) for token in tokens[:time]]
    return {
        "found": found,
        "run": f"on {len(tokens)} tokens in {dtype_name(sides[0].dtype)}",
        "tokens": texts,
        "steps": steps,
        "boxes": _boxes(steps),
        "curves": _curves(every, values[0]),
        "sources": [list(side.values()) for side in sources],
        "data": {
            "steps": data,
            "opens": next(
                (i for i, s in enumerate(every) if s.row is found.parted), 0
            ),
            "columns": maps.columns,
            "maps": maps.found,
            "following": following,
            "others": {},
            "tokens": texts,
            "pieces": {token: text_of(token) for token in named},
        },
    }


def fold_steps(found: ValueDiff) -> list[Step]:
    """Return the steps of both sides; the others fold into the next one.

    Where two models part is the last step.
    """
    sections = [(section, section.title) for section in found.sections()]
    if found.parted is not None:
        parting = Section((), [[found.parted]])
        sections.append((parting, "where they part"))
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
    """Say of each step what it computes, and how each side writes it."""
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
    """Return the package around a place's file, where it is imported."""
    if place is None:
        return None
    init = str(Path(place.path).with_name("__init__.py"))
    loaded = list(sys.modules.values())
    return next((m for m in loaded if held_by(m, "__file__") == init), None)


def _find(sources: Sources, place: Place | None) -> list[int] | None:
    """Return the number of the source that shows a place, and its lines.

    A source is the function around the line; each is there once.
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
            "title": f"{place.file}, {place.function}",
            "lines": fold("".join(lines[first - 1 : last]), first, {}),
        }
    last = max(place.line, place.span[2])
    return [list(sources).index(key), place.line, last]


def _boxes(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return the parts of the model in order, each with its steps.

    Names are those of the classes and functions that the lines are in.
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
                names[place.function.partition(".forward")[0]] = None
    return boxes


def _curves(
    steps: Sequence[Step], values: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Return the curves of three activations, and which of them ran."""
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
    """Return for each position the likeliest next ids, and the actual one.

    Rows hold pairs of an id and its log-probability, the actual next token's
    last; rests the logarithm of what all other ids weigh, at each
    temperature.
    """
    all_rows = log_probs.reshape(-1, log_probs.size(-1))[:time].double()
    # JSON has no infinity: a score of minus infinity is one that never comes
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
