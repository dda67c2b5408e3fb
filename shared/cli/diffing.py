"""What diff shows: sources side by side, or lines paired by their values."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..checkpoint.small_model import load_small_model
from ..comparison.page.render import render_diff
from ..comparison.sources import concept_names, pair_sources
from ..comparison.terminal import show_sources
from ..comparison.text import token_text
from ..comparison.values import Found, diff_by_value
from ..comparison.values.terminal import show_found
from ..files import write_atomically, write_json
from ..importing import first_on_path, show_theirs
from ..protocol import Style, load_style
from ..targets import load_target
from ..tokenization.texts import default_text
from ..tokenization.tokenizers import DEFAULT, load_tokenizer
from .choices import choose_text

TOKENS = 24  # of the default text that two styles are run on


def show_values(
    console: Console,
    names: Sequence[str],
    text: str | None,
    tokens: str | None,
    tokenizer_name: str,
    vocab_size: int | None,
    layer: int | None,
    json_file: Path | None,
    html_file: Path | None,
) -> bool:
    """Show and write what two models compute; whether it is the same."""
    ids = _choose_tokens(text, tokens, tokenizer_name)
    styles = [style for name in names if (style := _style(name))]
    found = _diff_values(names, styles, ids, vocab_size)
    if found.shares_nothing:
        raise ValueError(found.sentence)
    layers = {row.layer for row in found.rows()} - {None}
    if layer is not None and layer not in layers:
        raise ValueError(f"there is no layer {layer}: {len(layers)} in all")
    show_found(console, found, layer)
    if json_file is not None:
        content = {"models": names} | found.to_json()
        write_json(json_file, content)
    if html_file is not None:
        text_of: Callable[[int], str] = str
        if text is not None or (ids is None and len(styles) == 2):
            tokenizer = load_tokenizer(tokenizer_name, text or "")
            text_of = partial(token_text, tokenizer)
        write_atomically(html_file, render_diff(found, text_of))
        console.print(f"page: {html_file}", soft_wrap=True, markup=False)
    return found.same


def show_concepts(
    console: Console, names: Sequence[str], left: str | None, right: str | None
) -> None:
    """Show the source of a concept, or of all of them, in two styles."""
    sides = left or "annotated", right or "mingpt_style"
    styles = load_style(sides[0]), load_style(sides[1])
    known = concept_names(*styles)
    if names and names[0] not in known:
        raise ValueError(
            f"no concept {names[0]!r}; there is {', '.join(known)}"
        )
    sources = pair_sources(*styles)
    # without this, less does not show colours
    os.environ.setdefault("LESS", "-FRX")
    show_sources(console, sides, {c: sources[c] for c in names or known})


def _choose_tokens(
    text: str | None, tokens: str | None, tokenizer_name: str
) -> list[int] | None:
    """Return the ids that were asked for, None where none were."""
    if text is not None and tokens is not None:
        raise ValueError("give --text or --tokens, not both")
    if text is not None:
        content, _ = choose_text(text, None)
        return load_tokenizer(tokenizer_name, content).encode(content)
    if tokens is None:
        return None
    try:
        return [int(token) for token in tokens.split(",")]
    except ValueError:
        raise ValueError(
            f'--tokens must be numbers, as "1,2,3", got {tokens!r}'
        ) from None


def _diff_values(
    names: Sequence[str],
    styles: Sequence[Style],
    ids: list[int] | None,
    vocab_size: int | None,
) -> Found:
    """Run the two; an exception of a user's code is printed as theirs."""
    checkpoint = load_small_model() if len(styles) == 2 else None
    models: list[Callable[..., Any]]
    if checkpoint is None:
        models = [load_target(name, vocab_size) for name in names]
    else:  # two styles: from one set of weights
        if ids is None:
            ids = load_tokenizer(DEFAULT).encode(default_text())[:TOKENS]
        state = checkpoint.to(torch.device("cpu"), torch.float64)
        models = [s.from_gpt2(state, checkpoint.config) for s in styles]
    try:
        with first_on_path(Path.cwd()):
            return diff_by_value(
                models[0],
                models[1],
                ids,
                vocab_size=vocab_size,
                names=(names[0], names[1]),
            )
    except ValueError as error:
        if error.__cause__ is not None:
            show_theirs(error.__cause__)
        raise ValueError(str(error)) from None


def _style(name: str) -> Style | None:
    if ":" in name or name.endswith(".py"):
        return None
    try:
        return load_style(name)
    except ValueError:
        return None
