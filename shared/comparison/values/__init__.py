"""Two implementations, line by line: paired by the values they compute."""

from .diff import assert_same_values, diff_by_value
from .found import Alone, Found, Pair
from .parting import Parting
from .places import Place

__all__ = [
    "Alone",
    "Found",
    "Pair",
    "Parting",
    "Place",
    "assert_same_values",
    "diff_by_value",
]
