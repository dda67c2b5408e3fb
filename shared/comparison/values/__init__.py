"""Compare two implementations: pair lines that compute equal values."""

from ...running.places import Place
from .decoding import CacheDiff, diff_cache
from .diff import assert_same_values, diff_by_value
from .rows import Divergence, Row
from .value_diff import ValueDiff
from .writing import record_values

__all__ = [
    "CacheDiff",
    "Divergence",
    "Place",
    "Row",
    "ValueDiff",
    "assert_same_values",
    "diff_by_value",
    "diff_cache",
    "record_values",
]
