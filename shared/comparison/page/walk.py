"""One forward pass step by step: lines, sources, and maps of the values."""

import ast
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup
from torch import Tensor

from ..values import Found, Parting, Place
from ..values.rows import Row, Section, rows_of, sections_of
from ..values.side import Side, keep
from .highlight import highlight
from .value_maps import ValueMaps

ROWS = 32  # positions on a map: the first ones
LIKELIEST = 3  # next tokens that are named
AROUND = 4  # lines shown around one that is in no function


@dataclass
class Walk:
    """What the page needs to go through a forward pass.

    Attributes:
        names: of the two sides.
        sections: for each part of the run its title and its steps.
        sources: for each side the functions that steps are in: first line
            and lines as HTML.
        tokens: what to call each position.
        layers: how many layers a step can stand for.
        verdict: the finding in a sentence.
        same: whether the two are one function.
        run: how many tokens, and in which precision.
        notes: what could not be recorded.
        data: what the page's script reads.
    """

    names: tuple[str, str]
    sections: list[dict[str, Any]] = field(default_factory=list)
    sources: list[list[dict[str, Any]]] = field(
        default_factory=lambda: [[], []]
    )
    tokens: Sequence[str] = ()
    layers: int = 0
    verdict: str = ""
    same: bool = True
    run: str = ""
    notes: Sequence[str] = ()
    data: dict[str, Any] = field(default_factory=dict)


def make_walk(
    found: Found,
    sides: tuple[Side, Side],
    tokens: Sequence[int],
    text_of: Callable[[int], str],
) -> Walk:
    """Run both sides again for their values, and lay the steps out.

    The tokens are the first row of what both sides are run on.
    """
    sections = sections_of(rows_of(found))
    if found.parted is not None:
        sections.append(Section((), [[_parting(found.parted, sides)]]))
    rows = [r for s in sections for rows in s.rows_by_layer for r in rows]
    values = tuple(
        keep(
            side,
            {n for row in rows if (n := row.order[i]) is not None}
            | {side.first.normalised},
        )
        for i, side in enumerate(sides)
    )
    time = min(ROWS, len(tokens))
    maps = ValueMaps(time, len(tokens))
    sources = Sources()
    walk = Walk(
        found.names,
        tokens=[text_of(token) for token in tokens[:time]],
        layers=max((len(s.layers) for s in sections), default=0),
        verdict=found.sentence,
        same=found.same,
        run=f"on {len(tokens)} tokens in {str(sides[0].dtype)[6:]}",
        notes=found.notes,
    )
    steps: list[dict[str, Any]] = []
    for section in sections:
        shown = []
        for versions in zip(*section.rows_by_layer, strict=True):
            steps.append(
                {
                    "layers": list(section.layers),
                    "apart": [row.difference for row in versions],
                    "maps": [
                        maps.numbers(
                            *(
                                None if n is None else kept[n]
                                for n, kept in zip(
                                    row.order, values, strict=True
                                )
                            )
                        )
                        for row in versions
                    ],
                    "places": [
                        sources.find(i, place)
                        for i, place in enumerate(
                            (versions[0].left, versions[0].right)
                        )
                    ],
                }
            )
            shown.append({"number": len(steps), "row": versions[0]})
        title = _title(section)
        if found.parted is not None and section is sections[-1]:
            title = "where they part"
        walk.sections.append({"title": title, "steps": shown})
    walk.sources = sources.shown
    likeliest = [
        _likeliest(kept[side.first.normalised], time)
        for side, kept in zip(sides, values, strict=True)
    ]
    named = {id for side in likeliest for row in side for id, _ in row}
    walk.data = {
        "steps": steps,
        "columns": maps.columns,
        "maps": maps.found,
        "likeliest": likeliest,
        "tokens": walk.tokens,
        "pieces": {token: text_of(int(token)) for token in named},
    }
    return walk


def _parting(parted: Parting, sides: tuple[Side, Side]) -> Row:
    return Row(
        parted.left,
        parted.right,
        sides[1].first.values[parted.order[1]].shape,
        parted.difference,
        order=parted.order,
    )


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
        return max(1, place.line - AROUND), place.line + AROUND
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
