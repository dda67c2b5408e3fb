"""A diff by value as a page of its own."""

from collections.abc import Callable, Sequence

from ..values import Found
from ..values.side import Side
from .render import fill
from .walk import make_walk


def render_diff(
    found: Found,
    sides: tuple[Side, Side],
    tokens: Sequence[int],
    text_of: Callable[[int], str],
) -> str:
    """Return the page of what diff_by_value found, with all it needs inside.

    Both sides are run again on the tokens for their values.
    """
    walk = make_walk(found, sides, tokens, text_of)
    return fill(
        "diff.html",
        scripts=["walk"],
        styles=["page", "walk"],
        walk=walk,
        data={"walk": walk["data"]},
    )
