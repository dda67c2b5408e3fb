"""The kit around the two styles.

    __main__.py    python -m gpt_duet
    config.py      GPTConfig: the sizes, and what weights do not show
    names.py       the packages and their short names in a checkout
    masks.py       boolean masks: causal, padding, combined
    files.py       files and folders written whole or not at all
    timing.py      things timed in turn, on any device
    processes.py   work in a process of its own, which can be stopped
    validation.py  numbers, dtypes, devices and paths, checked
    protocol.py    what a language model and a style must offer
    tokenization/  text to ids, and texts to batches
    checkpoint/    weights on disk, and from style to style
    generation/    ids to more ids
    training/      a model learns a text
    invariants/    the checks, for anyone's model
    comparison/    two models side by side
    pytest_plugin.py  pytest --gpt-duet TARGET
    targets.py     a model named on the command line, loaded
    importing.py   imports of a user's files, each alone
    console.py     messages to the user, and how a command ends
    cli/           the command gpt-duet

An install brings this folder as gpt_duet, with the styles and the benchmarks
in it: `gpt_duet.annotated`. In a checkout its name is shared; the styles and
the users import `gpt_duet` in both.
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comparison.values import (
        assert_same_values,
        diff_by_value,
        record_values,
    )
    from .config import GPTConfig
    from .generation import generate
    from .invariants import (
        Target,
        check_model,
        check_scorer,
        influence,
        parametrize_with_checks,
        prove_causality,
        save_map,
        text_map,
    )
    from .tokenization import load_tokenizer

__all__ = [
    "GPTConfig",
    "Target",
    "assert_same_values",
    "check_model",
    "check_scorer",
    "diff_by_value",
    "generate",
    "influence",
    "load_tokenizer",
    "parametrize_with_checks",
    "prove_causality",
    "record_values",
    "save_map",
    "text_map",
]

_ROOMS = {  # all others are in invariants
    "GPTConfig": "config",
    "assert_same_values": "comparison.values",
    "diff_by_value": "comparison.values",
    "generate": "generation",
    "load_tokenizer": "tokenization",
    "record_values": "comparison.values",
}


def __getattr__(name: str) -> object:
    """Import a name's module at the first access: checks need few modules."""
    if name == "__version__":
        return version("gpt-duet")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = _ROOMS.get(name, "invariants")
    return getattr(import_module(f"{__name__}.{room}"), name)


if Path(__file__).parent.name == "shared":  # in a checkout
    import_module("gpt_duet.names").use_both_names()
