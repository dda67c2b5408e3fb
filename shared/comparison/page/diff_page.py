"""A diff by value as a page of its own."""

from collections.abc import Callable, Sequence

from markupsafe import Markup

from ..values import Found
from ..values.side import Side
from .render import make_environment, policy_hash, source_of, versions
from .walk import make_walk


def render_diff(
    found: Found,
    sides: tuple[Side, Side],
    tokens: Sequence[int],
    text_of: Callable[[int], str],
) -> str:
    """Return the page, with all it needs inside.

    Args:
        found: what diff_by_value found.
        sides: the two, to be run again for their values.
        tokens: the ids that were run.
        text_of: says what an id stands for.
    """
    walk = make_walk(found, sides, tokens, text_of)
    environment = make_environment()
    script = source_of(environment, "walk.js")
    style = "".join(
        source_of(environment, name) for name in ("page.css", "walk.css")
    )
    return environment.get_template("diff.html").render(
        walk=walk,
        style=Markup(style),
        script=Markup(script),
        script_hash=policy_hash(script),
        versions=versions(),
        data={"walk": walk.data},
    )
