"""gpt-duet diff: two implementations side by side, by source or by value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from ..files import STDOUT
from ..validation import require_different, require_parent, whole_number
from . import options

NARROWEST = 40


def diff(
    names: Annotated[
        list[str] | None,
        Argument(
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
        Option(
            help="Columns to use; below 120 the two stand one under the "
            "other. Default: the terminal's."
        ),
    ] = None,
    left: Annotated[
        str | None,
        Option(
            help="For a concept: the style on the left. Default: annotated.",
            show_default=False,
        ),
    ] = None,
    right: Annotated[
        str | None,
        Option(
            help="For a concept: the style on the right. "
            "Default: mingpt_style.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None, Option(help="For two models: the text to run.")
    ] = None,
    tokens: Annotated[
        str | None,
        Option(
            help='For two models: the ids to run, as "1,2,3". Default: a '
            "text for two styles, else 16 ids drawn from a seed.",
            show_default=False,
        ),
    ] = None,
    tokenizer_name: options.TokenizerName = options.TOKENIZER,
    vocab_size: Annotated[
        int | None,
        Option(help="Number of tokens, where a model does not say its own."),
    ] = None,
    layer: Annotated[
        int | None, Option(help="For two models: show this layer alone.")
    ] = None,
    json_file: options.Json = None,
    html_file: Annotated[
        Path | None,
        Option(
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
    on_stdout = json_file == STDOUT
    console = Console(highlight=False, width=width, stderr=on_stdout)
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
        from .diffing import show_concepts

        show_concepts(console, names, left, right)
        return
    _refuse({"left": left, "right": right}, "goes with a concept")
    require_parent(json_file)
    require_parent(html_file)
    require_different({"json": json_file, "html": html_file})
    if layer is not None:
        whole_number("--layer", layer)
    from .diffing import show_values

    same = show_values(
        console, names, text, tokens, tokenizer_name, vocab_size, layer,
        json_file, html_file,
    )  # fmt: skip
    if not same:
        raise typer.Exit(1)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name} {why}")
