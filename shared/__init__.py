"""The kit around the two styles: run a model, trace the run, state a verdict.

    running/       call anyone's model, reproducibly
    tracing/       what each line of a run computed
    proof/         what each number can depend on
    invariants/    the checks, for anyone's model
    comparison/    two models: values, styles, the page
    distributed/   a model compared with its sharded twin
    scoring/       checks of scorers (perplexity, bits per byte)
    tokenization/  text to ids, and texts to batches
    checkpoint/    weights on disk, and from style to style
    generation/    ids to more ids
    training/      a model learns a text
    cli/           the command gpt-duet

Small modules that every room may import:

    config.py             GPTConfig: the sizes, and what weights do not show
    masks.py              boolean masks: causal, padding, combined
    protocol.py           what a language model and a style must offer
    agreement.py          how far two styles may differ by rounding
    targets.py            load a model that is named as text
    importing.py          import a user's files, each isolated
    visibility.py         who may see whom: declarations for the checks
    names.py              names of the styles' packages
    files.py              write files and folders whole or not at all
    timing.py             time things in turn, on any device
    processes.py          run work in a process that can be stopped
    validation.py         check numbers, dtypes, devices and paths
    settings.py           each setting of a check, declared once
    console.py            messages to the user, and how a command ends
    notebooks.py          output in notebooks, and progress
    benchmark_results.py  the format of benchmark files
    pytest_plugin.py      pytest --gpt-duet TARGET

An install brings this folder as gpt_duet, with the styles and the benchmarks
in it: `gpt_duet.annotated`. In a checkout the folder is called shared, and
gpt_duet.py makes it the package gpt_duet. Code, tests and docs use that name.
"""

from importlib import import_module
from importlib.metadata import version
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

_ROOMS = {  # all others are in invariants
    "GPTConfig": "config",
    "assert_same_values": "comparison.values",
    "check_scorer": "scoring",
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
