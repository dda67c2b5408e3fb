"""What is neither style: configuration, masks, tokens, checks, commands."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import GPTConfig
    from .generation import generate
    from .tokenization import load_tokenizer

__all__ = ["GPTConfig", "generate", "load_tokenizer"]

_ROOMS = {
    "GPTConfig": "config",
    "generate": "generation",
    "load_tokenizer": "tokenization",
}


def __getattr__(name: str) -> object:
    """Import a name's room when it is asked for: checks need none of them."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
