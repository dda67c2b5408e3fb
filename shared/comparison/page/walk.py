"""One forward pass step by step: lines, sources, and maps of the values."""

import ast
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup
from torch import Tensor

from ..values import Found, Place, Row
from ..values.found import Section
from .highlight import highlight
from .value_maps import ValueMaps

ROWS = 32  # positions on a map: the first ones
LIKELIEST = 3  # next tokens that are named
AROUND = 4  # lines shown around one that is in no function


def make_walk(found: Found, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Run both sides again for their values, and lay the steps out.

    Returns what the template needs: titles and rows of each part of the run,
    for each side the functions that rows are in, and the data that the
    script reads.
    """
    sides = found.sides
    tokens = sides[0].tokens[0].tolist()
    sections = found.sections()
    titles = [_title(section) for section in sections]
    if found.parted is not None:
        parted = found.parted
        shape = sides[1].values[parted.order[1]].shape
        row = Row(
            parted.left, parted.right, shape, parted.difference,
            order=parted.order,
        )  # fmt: skip
        sections.append(Section((), [[row]]))
        titles.append("where they part")
    steps = [
        (section, versions)
        for section in sections
        for versions in zip(*section.rows_by_layer, strict=True)
    ]
    values = [
        side.keep(
            {row.order[i] for _, versions in steps for row in versions} - {-1}
            | {side.normalised}
        )
        for i, side in enumerate(sides)
    ]
    time = min(ROWS, len(tokens))
    maps = ValueMaps(time, len(tokens))
    sources = Sources()
    data = [
        {
            "layers": section.layers,
            "apart": [row.difference for row in versions],
            "maps": [
                maps.numbers(*map(dict.get, values, row.order))
                for row in versions
            ],
            "places": [
                sources.find(0, versions[0].left),
                sources.find(1, versions[0].right),
            ],
        }
        for section, versions in steps
    ]
    likeliest = [
        _likeliest(kept[side.normalised], time)
        for side, kept in zip(sides, values, strict=True)
    ]
    named = {id for side in likeliest for row in side for id, _ in row}
    texts = [text_of(token) for token in tokens[:time]]
    return {
        "found": found,
        "run": f"on {len(tokens)} tokens in {str(sides[0].dtype)[6:]}",
        "tokens": texts,
        "sections": [*zip(titles, (s.rows for s in sections), strict=True)],
        "sources": sources.shown,
        "data": {
            "steps": data,
            "columns": maps.columns,
            "maps": maps.found,
            "likeliest": likeliest,
            "tokens": texts,
            "pieces": {token: text_of(int(token)) for token in named},
        },
    }


def _title(section: Section) -> str:
    if not section.layers:
        return ""
    first, *others = section.layers
    more = f", and layers {others[0]} to {others[-1]} alike" if others else ""
    if len(others) == 1:
        more = f", and layer {others[0]} alike"
    return f"layer {first}{more}"


class Sources:
    """The functions that steps are in, each once."""

    def __init__(self) -> None:
        self.shown: list[list[dict[str, Any]]] = [[], []]
        self._known: dict[tuple[int, str, int], int] = {}

    def find(self, side: int, place: Place | None) -> list[int] | None:
        """Return the number of the source that shows a line, and the line."""
        if place is None:
            return None
        first, last = bounds(place)
        key = side, place.path, first
        if key not in self._known:
            self._known[key] = len(self.shown[side])
            lines = [
                linecache.getline(place.path, number)
                for number in range(first, last + 1)
            ]
            self.shown[side].append(
                {
                    "title": f"{place.file}, {place.function}",
                    "first": first,
                    "lines": _html("".join(lines)),
                }
            )
        return [self._known[key], place.line]


def bounds(place: Place) -> tuple[int, int]:
    """Return the first and the last line of the function around a line."""
    try:
        tree = ast.parse(Path(place.path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        tree = ast.Module([], [])
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= place.line <= (node.end_lineno or 0)
    ]
    if not around:
        return max(1, place.line - AROUND), place.line + AROUND
    inner = max(around, key=lambda node: node.lineno)
    return inner.lineno, inner.end_lineno or inner.lineno


def _html(code: str) -> list[Markup]:
    lines = highlight(code, {})
    return lines[:-1] if code.endswith("\n") else lines


def _likeliest(log_probs: Tensor, time: int) -> list[list[list[float]]]:
    """Return for each position the likeliest next ids, with probabilities."""
    rows = log_probs.reshape(-1, log_probs.size(-1))[:time].exp()
    top = rows.topk(min(LIKELIEST, rows.size(-1)))
    return [
        [
            [int(token), round(float(p), 6)]
            for p, token in zip(*row, strict=True)
        ]
        for row in zip(top.values, top.indices, strict=True)
    ]
