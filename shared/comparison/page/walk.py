"""One forward pass step by step: lines, sources, and maps of the values."""

import ast
import linecache
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..values import Found, Place
from ..values.rows import Section
from .highlight import highlight
from .value_maps import ValueMaps

ROWS = 32  # positions on a map: the first ones
LIKELIEST = 3  # next tokens that are named

Sources = dict[tuple[str, int], dict[str, Any]]  # by file and first line


def make_walk(found: Found, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Run both sides again for their values, and lay the steps out.

    Returns what the template needs: titles and rows of each part of the run,
    for each side the functions that rows are in, and the data that the
    script reads.
    """
    sides = found.sides
    tokens = sides[0].tokens[0].tolist()
    sections = found.sections()
    titles = [section.title for section in sections]
    if found.parted is not None:
        sections.append(Section((), [[found.parted]]))
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
    sources: tuple[Sources, Sources] = ({}, {})
    data = [
        {
            "layers": section.layers,
            "apart": [row.difference for row in versions],
            "maps": [
                maps.numbers(*map(dict.get, values, row.order))
                for row in versions
            ],
            "places": [
                _find(sources[0], versions[0].left),
                _find(sources[1], versions[0].right),
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
        "sections": [*zip(titles, sections, strict=True)],
        "sources": [list(side.values()) for side in sources],
        "data": {
            "steps": data,
            "columns": maps.columns,
            "maps": maps.found,
            "likeliest": likeliest,
            "tokens": texts,
            "pieces": {token: text_of(int(token)) for token in named},
        },
    }


def _find(sources: Sources, place: Place | None) -> list[int] | None:
    """Return the number of the source that shows a line, and the line.

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
            "first": first,
            "lines": highlight("".join(lines[first - 1 : last]).rstrip(), {}),
        }
    return [list(sources).index(key), place.line]


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
