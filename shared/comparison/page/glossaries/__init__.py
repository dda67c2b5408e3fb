"""Texts of the page about each style, in one module for each style.

    NAMES            for each concept, and for "everywhere", the names that
                     common terms have in the source; other names are paired
                     by the values that their calls return
    CHOICES          for each concept, a sentence on what the style chose
    STEPS            for each kind of step of a forward pass, how this style
                     writes it
    WEIGHT_TRANSFER  for each part, how this style writes it, and how
                     from_gpt2 loads its weights from a GPT-2 checkpoint
    BREAKS           for each part of breaking.PARTS, the edits that remove
                     it: module, text, and the text that replaces it
    WITHOUT          for each of these parts, and for each kind of step that
                     its removal changes, what the style does without it
    CACHE_SOURCE     the function that adds to the cache: module, name, and
                     texts that occur in the lines that add
    cached           a function that returns a layer's keys and values

A style without a module here may define these names in its own package.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ....names import short_name


def text_of(style: Any, kind: str) -> Any:
    """Return a style's texts of one kind (such as "NAMES"), or else {}."""
    return getattr(_glossary(style), kind, {})


def _glossary(style: Any) -> ModuleType | Any:
    name = short_name(getattr(style, "__name__", ""))
    ours = f"{__name__}.{name}"
    if name.isidentifier() and find_spec(ours) is not None:
        return import_module(ours)
    return style
