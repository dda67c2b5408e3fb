"""Choose text, config and weights from the options of several commands."""

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

# file that convert writes next to weights
TOKENIZER = "gpt_duet_tokenizer.json"
# value of --weights for random weights: no file is read
RANDOM = Path("random")
SMALL_NOTE = (
    "the small model that comes with gpt-duet, trained on Python's "
    "documentation and stored as a GPT-2 checkpoint"
)
SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 64}


@dataclass(frozen=True)
class ModelOptions:
    """The options that describe a model; an option not given is None."""

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
    """Return the text, and a name for where it comes from."""
    if text is not None and file is not None:
        raise ValueError("give --text or --file, not both")
    if file is not None:
        return read_text(file), str(file)
    if text is None:
        return default(), "Python's documentation"
    require_text("--text", text)
    return text, "--text"


def require_text(option: str, text: str) -> None:
    """Raise ValueError if a text is empty or not UTF-8."""
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

    By default, this is the tokenizer next to the weights, if convert wrote one
    there.
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

    The user's sizes replace the preset's, which replace the defaults. If the
    preset has no vocabulary size, the tokenizer's is used. `others` are
    further fields; a field that is None gets its default.
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
    """Return weights, their config, and notes on the source of the weights.

    The folder is the argument of --weights, or RANDOM. Without a folder, the
    weights are those of the kit's small model, or random if the user gave a
    size or another tokenizer.
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
    """Return a folder's weights, without rows beyond the tokenizer's ids."""
    for name in ("preset", "n_layer", "n_embd", "block_size"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{option} determines the sizes: leave out "
                f"--{name.replace('_', '-')}"
            )
    checkpoint = load_checkpoint(
        folder, n_head=options.n_head, activation=options.activation
    ).for_vocabulary(tokenizer.n_vocab, tokenizer_name)
    return replace(checkpoint, notes=(str(folder), *checkpoint.notes))
