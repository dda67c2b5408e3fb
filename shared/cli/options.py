"""Declare options that several subcommands share."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Option

from ..config import ACTIVATIONS, preset_names
from ..console import set_debug
from ..files import STDOUT, reserve_stdout
from ..settings import OPTIONS, Setting
from ..tokenization.tokenizers import DEFAULT

TOKENIZER = DEFAULT


def _reserve(path: Path | None) -> Path | None:
    if path == STDOUT:
        reserve_stdout()
    return path


Style = Annotated[
    str,
    Option(
        help='Package of the style: "annotated", "mingpt_style" or your own.'
    ),
]
Text = Annotated[str | None, Option(help="The text to run.")]
File = Annotated[
    Path | None,
    Option(
        help="A UTF-8 file with the text. Default: Python's own documentation."
    ),
]
TokenizerName = Annotated[
    str,
    Option(
        "--tokenizer",
        help='"duet-1k", "bytes", "char", or a tiktoken encoding or model '
        '("r50k_base", "davinci"). gpt-duet tokenizers lists them.',
    ),
]
Weights = Annotated[
    Path | None,
    Option(
        help="A folder with model.safetensors and config.json, from "
        "transformers' GPT-2, nanoGPT, minGPT or the post GPT from Scratch; "
        'or "random". Default: the small trained model of the kit, or random '
        "weights if sizes or another tokenizer are given."
    ),
]
Preset = Annotated[
    str | None, Option(help=f"Sizes by name: {', '.join(preset_names())}.")
]
NLayer = Annotated[int | None, Option(help="Number of blocks.")]
NHead = Annotated[int | None, Option(help="Attention heads in a block.")]
NEmbd = Annotated[int | None, Option(help="Width of the features.")]
BlockSize = Annotated[int | None, Option(help="Longest sequence, in tokens.")]
Activation = Annotated[
    str | None,
    Option(
        help=f"One of {', '.join(ACTIVATIONS)}. Default: that of the weights "
        "or the preset, otherwise gelu_tanh."
    ),
]
Steps = Annotated[int, Option(help="Number of updates.")]
BatchSize = Annotated[int, Option(help="Windows of the text in each update.")]
LearningRate = Annotated[float, Option("--lr", help="Highest learning rate.")]
EvalBatches = Annotated[int, Option(help="Batches in each evaluation.")]
Dtype = Annotated[str, Option("--dtype", help="float32 or float64.")]
Seed = Annotated[int, Option(help="Random seed.")]
Device = Annotated[
    str, Option("--device", help='"cpu", "cuda", "cuda:1", "mps", ...')
]
Json = Annotated[
    Path | None,
    Option(
        "--json",
        callback=_reserve,
        help="Also write all results to this JSON file. - is the standard "
        "output; everything else then goes to the standard error.",
    ),
]
Threads = Annotated[
    int | None,
    Option(
        min=1,
        help="CPU threads. Default: 1 for a small model, else all cores.",
    ),
]
Debug = Annotated[
    bool,
    Option(
        "--debug",
        callback=set_debug,
        help="Show whole tracebacks, including the kit's own lines.",
    ),
]


def with_settings(
    **follows: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all options that settings.py declares, as **settings.

    Args:
        **follows: for options of the command that the help shows among the
            settings, the setting before each.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = dict(signature.parameters)
        *_, rest = own
        del own[rest]
        # the parameters that come first: context, arguments
        shown = [own.pop(name) for name in [*own][:2]]
        between = {after: own.pop(name) for name, after in follows.items()}
        for one in OPTIONS:
            shown.append(_parameter(one))
            if one.name in between:
                shown.append(between[one.name])
        shown += own.values()
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=shown
        )
        return command

    return decorate


def _parameter(one: Setting) -> inspect.Parameter:
    """Return a setting as a parameter for typer."""
    how = Option(
        f"--{one.option}",
        help=one.shell.help,
        metavar=one.shell.metavar,
        min=one.shell.least if one.shell.least_shown else None,
    )
    return inspect.Parameter(
        one.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=one.unset,
        annotation=Annotated[one.type, how],
    )
