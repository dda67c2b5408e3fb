"""Options that several subcommands have, declared once."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import ACTIVATIONS, preset_names
from ..console import set_debug

TOKENIZER = "duet-1k"  # the kit's own, the default

Style = Annotated[
    str,
    typer.Option(
        "--style",
        help='Package of the style: "annotated", "mingpt_style" or your own.',
    ),
]
Text = Annotated[str | None, typer.Option("--text", help="The text to run.")]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="A UTF-8 file with the text. "
        "Default: Python's own documentation.",
    ),
]
TokenizerName = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        help='"duet-1k", "bytes", "char", or a tiktoken encoding or model '
        '("r50k_base", "davinci"); gpt-duet tokenizers lists them.',
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        help="A folder with model.safetensors and config.json: of "
        "transformers' GPT-2, nanoGPT, minGPT or the post GPT from Scratch. "
        'Or "random". Default: the small trained model of the kit; random '
        "weights where sizes or another tokenizer are given.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset", help=f"Sizes by name: {', '.join(preset_names())}."
    ),
]
NLayer = Annotated[
    int | None, typer.Option("--n-layer", help="Number of blocks.")
]
NHead = Annotated[
    int | None, typer.Option("--n-head", help="Attention heads in a block.")
]
NEmbd = Annotated[
    int | None, typer.Option("--n-embd", help="Width of the features.")
]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", help="Longest sequence, in tokens."),
]
Activation = Annotated[
    str | None,
    typer.Option(
        "--activation",
        help=f"One of {', '.join(ACTIVATIONS)}. Default: that of the weights "
        "or the preset, else gelu_tanh.",
    ),
]
Steps = Annotated[int, typer.Option("--steps", help="Number of updates.")]
BatchSize = Annotated[
    int,
    typer.Option("--batch-size", help="Windows of the text in each update."),
]
LearningRate = Annotated[
    float, typer.Option("--lr", help="Highest learning rate.")
]
EvalBatches = Annotated[
    int, typer.Option("--eval-batches", help="Batches in each evaluation.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32 or float64.")]
Seed = Annotated[int, typer.Option("--seed", help="Of all random numbers.")]
Device = Annotated[
    str, typer.Option("--device", help='"cpu", "cuda", "cuda:1", "mps", ...')
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Also write all results to this file; - is the standard "
        "output, and all else then goes to the standard error.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="Of the CPU. Default: one for a small model, else all cores.",
        show_default=False,
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=set_debug,
        help="Show whole tracebacks, the kit's own part too.",
    ),
]


def given(context: typer.Context) -> dict[str, Any]:
    """Return the options that the user gave, by their names ("--seed")."""
    return {
        parameter.opts[0]: context.params[parameter.name]
        for parameter in context.command.params
        if parameter.name
        and (source := context.get_parameter_source(parameter.name))
        and source.name == "COMMANDLINE"
    }
