"""What several subcommands ask for, and how their answers are checked."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint import Checkpoint, load_checkpoint
from ..config import ACTIVATIONS, GPTConfig, preset_fields, preset_names
from ..files import write_atomically
from ..tokenization.texts import default_text, read_text
from ..tokenization.tokenizers import Tokenizer

Text = Annotated[str | None, typer.Option("--text", help="The text itself.")]
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
        '("r50k_base", "davinci"); see gpt-duet tokenizers.',
    ),
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", help=f"One of {', '.join(preset_names())}."),
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
    int | None, typer.Option("--block-size", help="Longest sequence.")
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        help="A folder with model.safetensors and config.json: of "
        "transformers' GPT-2, nanoGPT, minGPT or the post GPT from Scratch. "
        "Default: random weights.",
    ),
]
Activation = Annotated[
    str | None,
    typer.Option(
        "--activation",
        help=f"One of {', '.join(ACTIVATIONS)}. Default: what comes with "
        "--weights, else gelu_tanh.",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help='"float32" or "float64".')]
Seed = Annotated[int, typer.Option("--seed", help="Of the random weights.")]
Device = Annotated[
    str, typer.Option("--device", help='"cpu", "cuda", "cuda:1", "mps", ...')
]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write the side-by-side page to this file."),
]
Bench = Annotated[
    Path | None,
    typer.Option(
        "--bench",
        help="Draw this benchmark in the page: a file that python -m "
        "benchmarks forward --json wrote.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write everything to this file, too."),
]

DEFAULTS = {"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 64}


def choose_text(text: str | None, file: Path | None) -> tuple[str, str]:
    """Return the text and where it is from.

    Raises:
        ValueError: for both at once, an empty text, or an unreadable file.
    """
    if text is not None and file is not None:
        raise ValueError("give --text or --file, not both")
    if file is not None:
        return read_text(file), str(file)
    if text is None:
        return default_text(), "Python's documentation"
    if not text:
        raise ValueError("--text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"--text is not UTF-8: {error.reason}") from None
    return text, "--text"


def choose_config(
    preset: str | None,
    tokenizer: Tokenizer,
    activation: str | None = None,
    **sizes: float | None,
) -> GPTConfig:
    """Return the config that the options describe.

    Sizes given by the user come first, then the preset's, then the
    defaults; the vocabulary is the tokenizer's where the preset leaves it
    open.

    Raises:
        ValueError: for what GPTConfig refuses, and for a tokenizer with
            more tokens than the preset has room for.
    """
    given: dict[str, Any] = {
        name: size for name, size in sizes.items() if size is not None
    }
    if activation is not None:
        given["activation"] = activation
    if preset is None:
        return GPTConfig(
            **DEFAULTS | {"vocab_size": tokenizer.n_vocab} | given
        )
    if preset in preset_names():
        fixed = preset_fields(preset)
        given.setdefault("block_size", DEFAULTS["block_size"])
        if "block_size" in fixed and sizes.get("block_size") is None:
            del given["block_size"]
        if "vocab_size" not in fixed:
            given["vocab_size"] = tokenizer.n_vocab
    config = GPTConfig.preset(preset, **given)
    if tokenizer.n_vocab > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.n_vocab} tokens, more than the "
            f"{config.vocab_size} of preset {preset}"
        )
    return config


def choose_checkpoint(
    folder: Path,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    *,
    n_head: int | None,
    activation: str | None,
    **sizes: object,
) -> Checkpoint:
    """Return the checkpoint in a folder, if it speaks the tokenizer's ids.

    Args:
        folder: what --weights names.
        tokenizer: whose vocabulary the checkpoint must have.
        tokenizer_name: its name.
        n_head: what weights do not show.
        activation: what weights do not show.
        **sizes: what they do show: options that must not be given.

    Raises:
        ValueError: for options beside --weights that say what weights show,
            and as load_checkpoint and for_vocabulary.
    """
    for name, value in sizes.items():
        if value is not None:
            raise ValueError(
                f"--weights brings its own sizes: leave "
                f"--{name.replace('_', '-')} out"
            )
    checkpoint = load_checkpoint(folder, n_head=n_head, activation=activation)
    return checkpoint.for_vocabulary(tokenizer.n_vocab, tokenizer_name)


def require_different(outputs: dict[str, Path | None], **inputs: Any) -> None:
    """Refuse to write a file over one that is read, or written too.

    Raises:
        ValueError: naming the two options.
    """
    seen: dict[Path, str] = {
        Path(path).resolve(): f"--{name}"
        for name, path in inputs.items()
        if path is not None
    }
    for name, path in outputs.items():
        if path is None:
            continue
        if other := seen.get(path.resolve()):
            raise ValueError(f"{other} and --{name} are one file, {path}")
        seen[path.resolve()] = f"--{name}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole, or leave the old one as it is."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False)
    write_atomically(path, text + "\n")


def _finite(content: Any) -> Any:
    """JSON knows neither NaN nor infinity: they become null."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
