"""A comparison, or the source of two styles, in the terminal."""

from .source import show_sources
from .tables import show_comparison, show_tokens

__all__ = ["show_comparison", "show_sources", "show_tokens"]
