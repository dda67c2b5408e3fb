"""gpt-duet diff: two implementations side by side, by source or by value."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..checkpoint.small_model import load_small_model
from ..comparison.concepts import choose_concepts
from ..comparison.page.diff_page import render_diff
from ..comparison.sources import concept_names, pair_sources
from ..comparison.terminal import show_sources
from ..comparison.text import token_text
from ..comparison.values import Found
from ..comparison.values.diff import run_diff
from ..comparison.values.side import Side
from ..comparison.values.terminal import show_found
from ..files import write_atomically, write_json
from ..protocol import Style, load_style
from ..targets import first_on_path, load_target, show_theirs
from ..tokenization.texts import default_text
from ..tokenization.tokenizers import DEFAULT, load_tokenizer
from ..validation import require_different, require_parent, whole_number
from . import options
from .choices import choose_text

NARROWEST = 40
TOKENS = 24  # of the default text that two styles are run on


def diff(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONCEPT] | LEFT RIGHT",
            help="A concept (embedding, attention, feed_forward, block, "
            "model or head; default: all of them): its source in both "
            "styles. Two models (a style, package.module:factory, "
            "path/to/file.py:factory, or an expression after the colon): "
            "their lines, paired by the values they compute.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            "--width",
            help="Columns to use; below 120 the two stand one under the "
            "other. Default: the terminal's.",
        ),
    ] = None,
    left: Annotated[
        str | None,
        typer.Option(
            "--left",
            help="For a concept: the style on the left. Default: annotated.",
            show_default=False,
        ),
    ] = None,
    right: Annotated[
        str | None,
        typer.Option(
            "--right",
            help="For a concept: the style on the right. "
            "Default: mingpt_style.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", help="For two models: the text to run."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help='For two models: the ids to run, as "1,2,3". Default: a '
            "text for two styles, else 16 ids drawn from a seed.",
            show_default=False,
        ),
    ] = None,
    tokenizer_name: options.TokenizerName = DEFAULT,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens, where a model does not say its own."
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option("--layer", help="For two models: show this layer alone."),
    ] = None,
    json_file: options.Json = None,
    html_file: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="For two models: also write a page that goes through both "
            "step by step.",
        ),
    ] = None,
) -> None:
    """Show two implementations side by side.

    Two models end with status 0 if they are one function on these tokens,
    with 1 if they part, and the last line says where. In a terminal a long
    source goes through a pager ($PAGER, or less).
    """
    if width is not None:
        whole_number("--width", width, at_least=NARROWEST)
    names = names or []
    if len(names) > 2:
        raise ValueError(f"diff takes two models, got {len(names)}")
    console = Console(highlight=False, width=width)
    by_value = {
        "text": text,
        "tokens": tokens,
        "vocab-size": vocab_size,
        "layer": layer,
        "json": json_file,
        "html": html_file,
    }
    if len(names) < 2:
        _refuse(by_value, "goes with two models")
        _show_sources(console, names, left, right)
        return
    _refuse({"left": left, "right": right}, "goes with a concept")
    require_parent(json_file)
    require_parent(html_file)
    require_different({"json": json_file, "html": html_file})
    if layer is not None:
        whole_number("--layer", layer)
    ids = _choose_tokens(text, tokens, tokenizer_name)
    found, sides = _diff_values(names, ids, vocab_size)
    if found.shares_nothing:
        raise ValueError(found.sentence)
    if layer is not None and layer not in found.layers:
        raise ValueError(
            f"there is no layer {layer}: {len(found.layers)} in all"
        )
    show_found(console, found, layer)
    if json_file is not None:
        content = {"models": names} | found.to_json()
        write_json(json_file, content)
    if html_file is not None:
        used = sides[0].tokens[0].tolist()
        known = text is not None or (ids is None and _are_styles(names))
        text_of: Callable[[int], str] = str
        if known:
            tokenizer = load_tokenizer(tokenizer_name, text or "")
            text_of = partial(token_text, tokenizer)
        write_atomically(html_file, render_diff(found, sides, used, text_of))
        console.print(f"page: {html_file}", soft_wrap=True, markup=False)
    if not found.same:
        raise typer.Exit(1)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name} {why}")


def _show_sources(
    console: Console,
    names: Sequence[str],
    left: str | None,
    right: str | None,
) -> None:
    sides = left or "annotated", right or "mingpt_style"
    styles = load_style(sides[0]), load_style(sides[1])
    concept = names[0] if names else None
    chosen = choose_concepts(concept, concept_names(*styles))
    sources = pair_sources(*styles)
    # without this, less does not show colours
    os.environ.setdefault("LESS", "-FRX")
    show_sources(console, sides, {c: sources[c] for c in chosen})


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
    names: Sequence[str], ids: list[int] | None, vocab_size: int | None
) -> tuple[Found, tuple[Side, Side]]:
    """Run the two; an exception of a user's code is printed as theirs."""
    styles = [_style(name) for name in names]
    checkpoint = load_small_model() if None not in styles else None
    models: list[Callable[..., Any]]
    if checkpoint is None:
        models = [load_target(name, vocab_size) for name in names]
    else:  # two styles: from one set of weights
        if ids is None:
            ids = load_tokenizer(DEFAULT).encode(default_text())[:TOKENS]
        state = checkpoint.to(torch.device("cpu"), torch.float64)
        models = [
            style.from_gpt2(state, checkpoint.config)
            for style in styles
            if style is not None
        ]
    try:
        with first_on_path(Path.cwd()):
            return run_diff(
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


def _are_styles(names: Sequence[str]) -> bool:
    return all(_style(name) is not None for name in names)


def _style(name: str) -> Style | None:
    if ":" in name or name.endswith(".py"):
        return None
    try:
        return load_style(name)
    except ValueError:
        return None
