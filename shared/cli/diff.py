"""gpt-duet diff: two implementations side by side, by source or by value."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from ..files import STDOUT, write_atomically, write_json
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
    whole: Annotated[
        bool,
        Option("--all", help="For two models: also lines of one side alone."),
    ] = False,
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
    if len(names) < 2:
        for option, value in (
            ("text", text),
            ("tokens", tokens),
            ("vocab-size", vocab_size),
            ("layer", layer),
            ("all", whole or None),
            ("json", json_file),
            ("html", html_file),
        ):
            if value is not None:
                raise ValueError(f"--{option} goes with two models")
        from .diffing import show_concepts

        show_concepts(console, names)
        return
    require_parent(json_file)
    require_parent(html_file)
    require_different({"json": json_file, "html": html_file})
    from ..comparison.page.render import render_diff
    from ..comparison.values.terminal import show_found
    from .diffing import choose_tokens, diff_values

    ids, text_of = choose_tokens(names, text, tokens, tokenizer_name)
    found = diff_values(names, ids, vocab_size)
    layers = {row.layer for row in found.rows()} - {None}
    if layer is not None and layer not in layers:
        raise ValueError(f"there is no layer {layer}: {len(layers)} in all")
    show_found(console, found, layer, whole)
    if json_file is not None:
        write_json(json_file, {"models": names} | found.to_json())
    if html_file is not None:
        write_atomically(html_file, render_diff(found, text_of))
        console.print(f"page: {html_file}", soft_wrap=True, markup=False)
    if not found.same:
        raise typer.Exit(1)
