"""Texts of the page about each style: a module for each style of the kit.

    NAMES            for each concept, and for "everywhere", common terms with
                     the names that mean them in the source, where equal values
                     do not show them
    CHOICES          for each concept what the style chose, in a sentence
    STEPS            for each kind of step of a forward pass how the style
                     writes it
    WEIGHT_TRANSFER  for each part how it is written, and how it takes over a
                     GPT-2 checkpoint's weights

A style from elsewhere may have these as names of its package.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ....names import short_name


def text_of(style: Any, kind: str) -> dict[str, Any]:
    """Return the texts of one kind about a style; {} where there are none."""
    return getattr(_glossary(style), kind, {})


def _glossary(style: Any) -> ModuleType | Any:
    name = short_name(getattr(style, "__name__", ""))
    ours = f"{__name__}.{name}"
    if name.isidentifier() and find_spec(ours) is not None:
        return import_module(ours)
    return style
