"""For tests of both styles: the styles by name, and changed weights."""

from gpt_duet import annotated, mingpt_style

STYLES = {"annotated": annotated, "mingpt_style": mingpt_style}


def changed(state, change):
    """Return a dict with some entries replaced; None removes an entry."""
    return {k: v for k, v in (state | change).items() if v is not None}
