"""The kit's own name for the folder shared/, whatever else is called shared.

A project with a shared/ of its own says `from gpt_duet import check_model`.
`gpt_duet.config` and `shared.config` are one module where both are ours: see
shared/__init__.py.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.comparison.values import assert_same_values, diff_by_value
    from shared.config import GPTConfig
    from shared.generation import generate
    from shared.invariants import (
        check_model,
        influence,
        parametrize_with_checks,
    )
    from shared.tokenization import load_tokenizer

__all__ = [
    "GPTConfig",
    "assert_same_values",
    "check_model",
    "diff_by_value",
    "generate",
    "influence",
    "load_tokenizer",
    "parametrize_with_checks",
]

__path__ = [str(Path(__file__).resolve().with_name("shared"))]

_ROOMS = {
    "GPTConfig": "config",
    "assert_same_values": "comparison.values",
    "check_model": "invariants",
    "diff_by_value": "comparison.values",
    "generate": "generation",
    "influence": "invariants",
    "load_tokenizer": "tokenization",
    "parametrize_with_checks": "invariants",
}


def __getattr__(name: str) -> object:
    """Import a name's room when it is asked for: checks need few of them."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
