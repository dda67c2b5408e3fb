"""Python source as HTML lines, corresponding names marked."""

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

Terms = Mapping[str, Sequence[str]]


def spans(code: str, terms: Terms) -> list[tuple[int, int, str]]:
    """Where names of terms stand in the source, in order, none overlapping.

    "x[0..2]" stands for every x that no longer name claims; any other name
    is sought as it is written.
    """
    patterns = [
        (re.sub(r"\[\d+\.\.\d+\]$", "", name), term)
        for term, spellings in terms.items()
        for name in spellings
    ]
    taken: list[tuple[int, int, str]] = []
    for name, term in sorted(patterns, key=lambda p: -len(p[0])):
        for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", code):
            start, end = match.span()
            if all(end <= a or b <= start for a, b, _ in taken):
                taken.append((start, end, term))
    return sorted(taken)


def highlight(code: str, terms: Terms) -> list[Markup]:
    """Return each line of Python source as HTML.

    Where a name of a term stands, the element gets the attribute data-term.
    """
    marks = spans(code, terms)
    cuts = sorted({n for start, end, _ in marks for n in (start, end)})
    lines = [Markup()]
    position = 0
    lexer = PythonLexer(stripnl=False, stripall=False, ensurenl=False)
    for kind, value in lexer.get_tokens(code):
        for piece in _cut(value, position, cuts):
            term = next((t for a, b, t in marks if a <= position < b), "")
            position += len(piece)
            for number, text in enumerate(piece.split("\n")):
                if number:
                    lines.append(Markup())
                lines[-1] += _element(text, _css_class(kind), term)
    return lines


def _cut(value: str, position: int, cuts: Sequence[int]) -> list[str]:
    """Cut a token where a marked name begins or ends."""
    first = bisect.bisect_right(cuts, position)
    last = bisect.bisect_left(cuts, position + len(value))
    edges = [0, *(c - position for c in cuts[first:last]), len(value)]
    return [value[a:b] for a, b in itertools.pairwise(edges) if a < b]


def _css_class(kind: Any) -> str:
    while kind not in STANDARD_TYPES:
        kind = kind.parent
    return STANDARD_TYPES[kind]


def _element(text: str, css: str, term: str) -> Markup:
    if not text:
        return Markup()
    if term:
        return Markup('<span class="{} term" data-term="{}">{}</span>').format(
            css, term, text
        )
    if css in ("", "p", "w", "n"):
        return Markup("{}").format(text)
    return Markup('<span class="{}">{}</span>').format(css, text)
