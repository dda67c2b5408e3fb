"""Return source as HTML lines in colours, with details that can be folded.

Names that correspond in both styles are marked.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

WIDTH = 79
Terms = Mapping[str, Sequence[str]]


class Line(NamedTuple):
    """A line of source in a page.

    A signature's short form comes before the lines that it replaces.
    """

    number: int
    code: Markup
    kind: str  # "" always shown, "fold" foldable, "brief" shown while folded


def fold(code: str, first: int, terms: Terms) -> list[Line]:
    """Return highlighted lines of source, numbered from `first`.

    Foldable lines are docstrings; checks of arguments (an `if` that only
    raises, with the comment above it); branches that run only with a cache;
    and signatures with annotations. A signature also gets a short form
    without its annotations.
    """
    folded, briefs = set[int](), dict[int, str]()
    code = code.rstrip()
    source = code.split("\n")
    try:
        tree = ast.parse(textwrap.dedent(code))
    except SyntaxError:  # the code is not made of whole statements
        tree = ast.Module([], [])
    for start, end, brief in _foldable(tree):
        while not brief and source[max(0, start - 2)].strip()[:1] == "#":
            start -= 1
        folded.update(range(start, end + 1))
        if brief:
            line = source[start - 1]
            indent = line[: len(line) - len(line.lstrip())]
            briefs[start] = textwrap.fill(
                brief,
                WIDTH,
                initial_indent=indent,
                subsequent_indent=indent + 8 * " ",
                break_on_hyphens=False,
            )
    for number in range(1, len(source)):  # fold blank lines after folded ones
        if number in folded and not source[number].strip():
            folded.add(number + 1)
    lines = []
    for number, line in enumerate(highlight(code, terms), 1):
        if number in briefs:
            lines += [
                Line(first + number - 1, short, "brief")
                for short in highlight(briefs[number], terms)
            ]
        kind = "fold" if number in folded else ""
        lines.append(Line(first + number - 1, line, kind))
    return lines


def _foldable(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    """Yield the first line, last line and short form of foldable code."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(body=[first, *_]):
                if node.lineno < first.lineno and (brief := _signature(node)):
                    yield node.lineno, first.lineno - 1, brief
            case (
                ast.If(body=[*_, ast.Raise()], orelse=[])
                | ast.If(
                    test=ast.Compare(ast.Name("cache"), [ast.IsNot()]),
                    orelse=[],
                )
                | ast.Expr(value=ast.Constant(value=str()))
            ):
                yield node.lineno, node.end_lineno or 0, ""


def _signature(node: ast.FunctionDef) -> str:
    """Return a signature without annotations, "" if there are none."""
    every = ast.walk(node.args)
    notes = [a for a in every if isinstance(a, ast.arg) and a.annotation]
    if not notes and node.returns is None:
        return ""
    for argument in notes:
        argument.annotation = None
    # without annotations, unparse writes defaults without spaces
    return f"def {node.name}({ast.unparse(node.args)}):"


def spans(code: str, terms: Terms) -> list[tuple[int, int, str]]:
    """Return where names of terms occur in the source: start, end, term.

    The results are in order and do not overlap. Names are found only as whole
    words. Of a name such as "x[0..2]", only x is searched for.
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

    A name that belongs to a term gets the attribute data-term.
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
                lines[-1] += _element(text, STANDARD_TYPES.get(kind, ""), term)
    return lines


def _element(text: str, css: str, term: str) -> Markup:
    if term:
        return Markup('<span class="{} term" data-term="{}">{}</span>').format(
            css, term, text
        )
    if css in ("", "p", "w", "n"):
        return Markup("{}").format(text)
    return Markup('<span class="{}">{}</span>').format(css, text)
