"""Check whether a decoder-only language model is correct.

For example:

    from gpt_duet import check_model
    print(check_model(lambda: MyGPT(config), vocab_size=65, block_size=64))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exports import *  # noqa: F403


def __getattr__(name: str) -> object:
    """Import the checks only when a name is used; reports need no torch."""
    if name == "__all__":
        return __dir__()
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.exports"), name)


def __dir__() -> list[str]:
    """Return the names of this package, for completion at a prompt."""
    names = dir(import_module(f"{__name__}.exports"))
    return [name for name in names if not name.startswith("_")]
