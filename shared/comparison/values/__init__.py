"""Two implementations, line by line: paired by the values they compute."""

from ...running.places import Place
from .decoding import CacheDiff, diff_cache
from .diff import assert_same_values, diff_by_value
from .recording import record_values
from .rows import Divergence, Row
from .value_diff import ValueDiff

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
