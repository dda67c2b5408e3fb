"""Options that several subcommands have, declared once."""

from pathlib import Path
from typing import Annotated

from typer import Option

from ..config import ACTIVATIONS, preset_names
from ..console import set_debug
from ..files import STDOUT, reserve_stdout
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
        '("r50k_base", "davinci"); gpt-duet tokenizers lists them.',
    ),
]
Weights = Annotated[
    Path | None,
    Option(
        help="A folder with model.safetensors and config.json: of "
        "transformers' GPT-2, nanoGPT, minGPT or the post GPT from Scratch. "
        'Or "random". Default: the small trained model of the kit; random '
        "weights where sizes or another tokenizer are given."
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
        "or the preset, else gelu_tanh."
    ),
]
Steps = Annotated[int, Option(help="Number of updates.")]
BatchSize = Annotated[int, Option(help="Windows of the text in each update.")]
LearningRate = Annotated[float, Option("--lr", help="Highest learning rate.")]
EvalBatches = Annotated[int, Option(help="Batches in each evaluation.")]
Dtype = Annotated[str, Option("--dtype", help="float32 or float64.")]
Seed = Annotated[int, Option(help="Of all random numbers.")]
Device = Annotated[
    str, Option("--device", help='"cpu", "cuda", "cuda:1", "mps", ...')
]
Json = Annotated[
    Path | None,
    Option(
        "--json",
        callback=_reserve,
        help="Also write all results to this file; - is the standard "
        "output, and all else then goes to the standard error.",
    ),
]
Cache = Annotated[
    str | None,
    Option(
        metavar="MAKER",
        help="What makes an empty cache to decode with, as "
        "my_pkg:make_cache, for a model whose own is not found.",
    ),
]
Threads = Annotated[
    int | None,
    Option(
        min=1,
        help="Of the CPU. Default: one for a small model, else all cores.",
    ),
]
Debug = Annotated[
    bool,
    Option(
        "--debug",
        callback=set_debug,
        help="Show whole tracebacks, the kit's own part too.",
    ),
]
