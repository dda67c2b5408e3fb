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
    """Return the page of what diff_by_value found, with all it needs inside.

    Both sides are run again on the tokens for their values.
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
