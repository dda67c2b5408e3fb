"""The kit around the two styles, which are implementations of a GPT decoder.

    running/       call any model, reproducibly
    tracing/       record the values that each line of a run computes
    proof/         find the inputs on which each score can depend
    invariants/    the checks, for any model
    comparison/    compare two models: values, styles, the page
    distributed/   compare a model with a sharded copy of it
    scoring/       check scorers (perplexity, bits per byte)
    tokenization/  turn text into ids, and texts into batches
    checkpoint/    read and write weights, and convert them between styles
    generation/    generate tokens
    training/      train a model on a text
    cli/           the command gpt-duet

Small modules that every package may import:

    config.py             GPTConfig: the sizes, and other facts about a model
    masks.py              boolean masks: causal, padding, combined
    protocol.py           protocols for a language model and for a style
    agreement.py          how far rounding can make two styles differ
    targets.py            load a model that is named as text
    importing.py          import a user's files, each isolated
    visibility.py         declare which tokens a position may see
    names.py              names of the styles' packages
    files.py              write files and folders, all or nothing
    timing.py             time things in turn, on any device
    processes.py          run work in a process that can be stopped
    validation.py         check numbers, dtypes, devices and paths
    settings.py           each setting of a check, declared once
    console.py            messages to the user, and how a command ends
    notebooks.py          output in notebooks, and progress
    benchmark_results.py  the format of benchmark files
    pytest_plugin.py      pytest --gpt-duet TARGET

An install contains this folder as gpt_duet, with the styles and the
benchmarks in it, for example as `gpt_duet.annotated`. In a checkout the folder
is called shared, and gpt_duet.py makes it the package gpt_duet, which is the
name that code, tests and docs use.
"""

from importlib import import_module
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
        guard,
        influence,
        parametrize_with_checks,
        prove_causality,
        save_map,
        text_map,
    )
    from .scoring import check_scorer
    from .tokenization import load_tokenizer

__all__ = [
    "GPTConfig",
    "Target",
    "assert_same_values",
    "check_model",
    "check_scorer",
    "diff_by_value",
    "generate",
    "guard",
    "influence",
    "load_tokenizer",
    "parametrize_with_checks",
    "prove_causality",
    "record_values",
    "save_map",
    "text_map",
]

_ROOMS = {  # the package of each name; the other names are in invariants
    "GPTConfig": "config",
    "assert_same_values": "comparison.values",
    "check_scorer": "scoring",
    "diff_by_value": "comparison.values",
    "generate": "generation",
    "load_tokenizer": "tokenization",
    "record_values": "comparison.values",
}


def __getattr__(name: str) -> object:
    """Import a name's module when the name is first used."""
    if name == "__version__":
        from importlib.metadata import version  # slow: it imports email

        return version("gpt-duet")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = _ROOMS.get(name, "invariants")
    return getattr(import_module(f"{__name__}.{room}"), name)
