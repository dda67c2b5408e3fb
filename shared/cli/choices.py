"""Text, config and weights as the options of several commands choose them."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..agreement import enlarged_random_weights
from ..checkpoint import SMALL_MODEL, Checkpoint, load_checkpoint
from ..config import GPTConfig, preset_fields, preset_names
from ..protocol import Style
from ..tokenization.texts import default_text, read_text
from ..tokenization.tokenizers import DEFAULT, Tokenizer, load_tokenizer

TOKENIZER = "gpt_duet_tokenizer.json"  # next to weights that were trained here
RANDOM = Path("random")  # of --weights: none of a file
SMALL_NOTE = (
    "the small model that comes with gpt-duet, trained on Python's "
    "documentation and stored as a GPT-2 checkpoint"
)
SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 64}


@dataclass(frozen=True)
class ModelOptions:
    """The options that describe a model; None for each that is not given."""

    preset: str | None
    n_layer: int | None
    n_head: int | None
    n_embd: int | None
    block_size: int | None
    activation: str | None


def describe(config: GPTConfig) -> str:
    """Return a config's sizes in words."""
    return (
        f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} "
        f"wide, block size {config.block_size}"
    )


def choose_text(
    text: str | None,
    file: Path | None,
    default: Callable[[], str] = default_text,
) -> tuple[str, str]:
    """Return the text and where it is from."""
    if text is not None and file is not None:
        raise ValueError("give --text or --file, not both")
    if file is not None:
        return read_text(file), str(file)
    if text is None:
        return default(), "Python's documentation"
    require_text("--text", text)
    return text, "--text"


def require_text(option: str, text: str) -> None:
    """Refuse an empty text, and bytes of the command line that are none."""
    if not text:
        raise ValueError(f"{option} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{option} is not UTF-8: {error.reason}") from None


def choose_tokenizer(
    name: str, text: str, weights: Path | None
) -> tuple[Tokenizer, str]:
    """Return a tokenizer and its name.

    The default is the tokenizer that convert wrote next to the weights, if
    there is one.
    """
    if weights is not None and (weights / TOKENIZER).is_file():
        own = json.loads((weights / TOKENIZER).read_text("utf-8"))
        if name in (DEFAULT, own["name"]):
            return load_tokenizer(own["name"], own["characters"]), own["name"]
    return load_tokenizer(name, text), name


def choose_config(
    options: ModelOptions,
    tokenizer: Tokenizer,
    sizes: dict[str, int] = SIZES,
    **others: Any,
) -> GPTConfig:
    """Return the config that the options describe.

    Sizes given by the user come first, then the preset's, then the
    defaults; the vocabulary is the tokenizer's where the preset leaves it
    open. Others are further fields of the config; None for the default.
    """
    given = {k: v for k, v in asdict(options).items() if v is not None}
    given |= {k: v for k, v in others.items() if v is not None}
    preset = given.pop("preset", None)
    vocab_size = tokenizer.n_vocab
    if preset is None:
        return GPTConfig(**{"vocab_size": vocab_size} | sizes | given)
    open_fields = {"vocab_size": vocab_size, "block_size": sizes["block_size"]}
    fixed = preset_fields(preset) if preset in preset_names() else {}
    given = {k: v for k, v in open_fields.items() if k not in fixed} | given
    config = GPTConfig.preset(preset, **given)
    if vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, more than the "
            f"{config.vocab_size} of preset {preset}"
        )
    return config


def choose_weights(
    folder: Path | None,
    options: ModelOptions,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    *,
    style: Style,
    seed: int,
) -> Checkpoint:
    """Return weights with their config, and in words where they are from.

    The folder is the argument of --weights, or RANDOM. None is the small
    model of the kit if no other size or tokenizer is given, else random
    weights, which the style draws.
    """
    if (
        folder is None
        and tokenizer_name == DEFAULT
        and all(value is None for value in asdict(options).values())
    ):
        return replace(load_checkpoint(SMALL_MODEL), notes=(SMALL_NOTE,))
    if folder in (None, RANDOM):
        config = choose_config(options, tokenizer)
        state = enlarged_random_weights(style, config, seed)
        note = f"random, seed {seed}, enlarged so that every part matters"
        return Checkpoint(state, config, (note,))
    assert folder is not None
    return load_weights(folder, options, tokenizer, tokenizer_name)


def load_weights(
    folder: Path,
    options: ModelOptions,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    option: str = "--weights",
) -> Checkpoint:
    """Return what an option's folder has, cut to the tokenizer's ids."""
    for name in ("preset", "n_layer", "n_embd", "block_size"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{option} brings its own sizes: leave "
                f"--{name.replace('_', '-')} out"
            )
    checkpoint = load_checkpoint(
        folder, n_head=options.n_head, activation=options.activation
    ).for_vocabulary(tokenizer.n_vocab, tokenizer_name)
    return replace(checkpoint, notes=(str(folder), *checkpoint.notes))
