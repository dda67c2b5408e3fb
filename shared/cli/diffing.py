"""What diff runs: sources side by side, or two models on some tokens."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ..checkpoint import SMALL_MODEL, load_checkpoint
from ..comparison.sources import concept_names, pair_sources
from ..comparison.terminal import show_sources
from ..comparison.text import token_text
from ..comparison.values import Found, diff_by_value
from ..importing import first_on_path, show_theirs
from ..names import package_of
from ..protocol import Style, load_style
from ..targets import STYLE_SIZES, load_target
from ..tokenization.texts import default_text
from ..tokenization.tokenizers import DEFAULT, load_tokenizer
from .choices import require_text

TOKENS = 24  # of the default text that two styles are run on
STYLES = ("annotated", "mingpt_style")


def show_concepts(console: Console, names: Sequence[str]) -> None:
    """Show the source of a concept, or of all of them, in both styles."""
    styles = load_style(STYLES[0]), load_style(STYLES[1])
    known = concept_names(*styles)
    if names and names[0] not in known:
        raise ValueError(
            f"no concept {names[0]!r}; there is {', '.join(known)}"
        )
    sources = pair_sources(*styles)
    # without this, less does not show colours
    os.environ.setdefault("LESS", "-FRX")
    show_sources(console, STYLES, {c: sources[c] for c in names or known})


def choose_tokens(
    names: Sequence[str],
    text: str | None,
    tokens: str | None,
    tokenizer_name: str,
) -> tuple[list[int] | None, Callable[[int], str]]:
    """Return the ids to run, None for drawn ones, and how to show an id.

    Two styles run on a text by default: the small model was trained on it.
    """
    if text is not None and tokens is not None:
        raise ValueError("give --text or --tokens, not both")
    if tokens is not None:
        try:
            return [int(token) for token in tokens.split(",")], str
        except ValueError:
            raise ValueError(
                f'--tokens must be numbers, as "1,2,3", got {tokens!r}'
            ) from None
    if text is not None:
        require_text("--text", text)
        tokenizer = load_tokenizer(tokenizer_name, text)
        return tokenizer.encode(text), partial(token_text, tokenizer)
    if all(map(_style, names)):
        tokenizer = load_tokenizer(DEFAULT)
        ids = tokenizer.encode(default_text())[:TOKENS]
        return ids, partial(token_text, tokenizer)
    return None, str


def diff_values(
    names: Sequence[str], ids: list[int] | None, vocab_size: int | None
) -> Found:
    """Run two models, two styles from one set of weights.

    An exception of a user's code is printed as theirs.
    """
    styles = [style for name in names if (style := _style(name))]
    sizes = _default_sizes(names, vocab_size) if len(styles) == 1 else ""
    if len(styles) < 2:
        left, right = (load_target(name, vocab_size) for name in names)
    else:
        checkpoint = load_checkpoint(SMALL_MODEL)
        state = checkpoint.to(torch.device("cpu"), torch.float64)
        left, right = (s.from_gpt2(state, checkpoint.config) for s in styles)
    try:
        with first_on_path(Path.cwd()):
            found = diff_by_value(
                left,
                right,
                ids,
                vocab_size=vocab_size,
                names=(names[0], names[1]),
            )
    except ValueError as error:
        if error.__cause__ is not None:
            show_theirs(error.__cause__)
        raise ValueError(f"{error}{sizes}") from None
    if found.shares_nothing:
        raise ValueError(f"{found.sentence}{sizes}")
    return found


def _default_sizes(names: Sequence[str], vocab_size: int | None) -> str:
    """Say which of two models has default sizes, and what sets them."""
    (name,) = filter(_style, names)
    model = f"{package_of(name)}.model:build_model(GPTConfig(...))"
    sizes = STYLE_SIZES | ({"vocab_size": vocab_size} if vocab_size else {})
    shown = ", ".join(f"{key} {size}" for key, size in sizes.items())
    return (
        f"; the sizes of {name} are defaults ({shown}): --vocab-size "
        f'sets its vocabulary, an expression all sizes, as "{model}"'
    )


def _style(name: str) -> Style | None:
    if ":" in name or name.endswith(".py"):
        return None
    try:
        return load_style(name)
    except ValueError:
        return None
