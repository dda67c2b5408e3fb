"""Two models side by side: how far apart they are, and where.

styles.py           two styles from one set of weights
models.py           two models beside each other, stage by stage
values/             any two models, line by line, by what they compute
concepts.py         what each part of a decoder does
sources.py          the source of two styles, in pairs
columns.py          the same in the terminal
terminal.py         a comparison in the terminal
page/               a comparison as a page
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .models import compare_models, stage_outputs
    from .styles import Comparison, compare_styles
    from .values import assert_same_values, diff_by_value

__all__ = [
    "Comparison",
    "assert_same_values",
    "compare_models",
    "compare_styles",
    "diff_by_value",
    "stage_outputs",
]

_ROOMS = {
    "Comparison": "styles",
    "assert_same_values": "values",
    "compare_models": "models",
    "compare_styles": "styles",
    "diff_by_value": "values",
    "stage_outputs": "models",
}


def __getattr__(name: str) -> object:
    """Import a name's module when it is asked for."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
