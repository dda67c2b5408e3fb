"""Checks that tell whether a decoder-only language model is one.

from gpt_duet import check_model
print(check_model(lambda: MyGPT(config), vocab_size=65, block_size=64))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exports import *  # noqa: F403


def __getattr__(name: str) -> object:
    """Import the checks at the first access: a report needs no torch."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.exports"), name)


def __dir__() -> list[str]:
    """Return the names that this package gives, for a prompt to complete."""
    return [*import_module(f"{__name__}.exports").__all__]
