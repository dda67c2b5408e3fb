"""Two implementations, line by line: paired by the values they compute."""

from .diff import assert_same_values, diff_by_value
from .found import Found
from .places import Place
from .rows import Parting, Row

__all__ = [
    "Found",
    "Parting",
    "Place",
    "Row",
    "assert_same_values",
    "diff_by_value",
]
