"""Python source as HTML lines, corresponding names marked."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
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
    term_of: dict[str, str] = {}
    for term, spellings in terms.items():
        for name in spellings:
            term_of.setdefault(re.sub(r"\[\d+\.\.\d+\]$", "", name), term)
    longest_first = sorted(term_of, key=len, reverse=True)
    names = "|".join(map(re.escape, longest_first))
    found = re.finditer(rf"(?<!\w)(?:{names})(?!\w)", code) if names else ()
    return [(*match.span(), term_of[match[0]]) for match in found]


def highlight(code: str, terms: Terms) -> list[Markup]:
    """Return each line of Python source as HTML.

    Where a name of a term stands, the element gets the attribute data-term.
    """
    term_at = {
        position: term
        for start, end, term in spans(code, terms)
        for position in range(start, end)
    }
    lines = [Markup()]
    lexer = PythonLexer(stripnl=False, stripall=False, ensurenl=False)
    for start, kind, value in lexer.get_tokens_unprocessed(code):
        marks = [
            (character == "\n", term_at.get(place, ""))
            for place, character in enumerate(value, start)
        ]
        for (line_ends, term), places in groupby(
            range(len(value)), marks.__getitem__
        ):
            text = "".join(value[place] for place in places)
            if line_ends:
                lines += [Markup()] * len(text)
            else:
                lines[-1] += _element(text, _css_class(kind), term)
    return lines


def _css_class(kind: Any) -> str:
    while kind not in STANDARD_TYPES:
        kind = kind.parent
    return STANDARD_TYPES[kind]


def _element(text: str, css: str, term: str) -> Markup:
    if term:
        return Markup('<span class="{} term" data-term="{}">{}</span>').format(
            css, term, text
        )
    if css in ("", "p", "w", "n"):
        return Markup("{}").format(text)
    return Markup('<span class="{}">{}</span>').format(css, text)
