"""Two styles, one set of weights: how far apart they are, and where."""

from .models import compare_models, stage_outputs
from .styles import Comparison, compare_styles

__all__ = [
    "Comparison",
    "compare_models",
    "compare_styles",
    "stage_outputs",
]
