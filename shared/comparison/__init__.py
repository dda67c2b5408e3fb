"""Two models or two styles side by side: how far they differ, and where.

    styles.py           two styles on one set of weights, and the verdict
    models.py           two models: outputs by stage, parameters, times
    values/             any two models, line by line, by what they compute
    concepts.py         the six concepts: what each does in any style
    sources.py          the source of two styles, paired by concept
    text.py             texts and tokens, every character visible
    timing.py           things timed in turn, on any device
    benchmark_results.py  the file of a benchmark

Measured for the page:

    attention_maps.py   attention probabilities, watched while a model runs
    costs.py            parameters and operations by concept
    weight_transfer.py  how both styles take over a GPT-2 checkpoint

And shown in terminal/ (tables, source) and page/ (one HTML file).
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
