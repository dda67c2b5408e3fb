"""gpt-duet diff: compare two implementations by source or by value."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from ..console import given_options
from ..files import STDOUT, write_atomically, write_json
from ..importing import theirs_shown
from ..validation import (
    DTYPES,
    choose_dtype,
    require_different,
    require_parent,
    whole_number,
)
from . import options
from .diffing import (
    choose_tokens,
    decode,
    diff_of_ranks,
    diff_of_scores,
    diff_values,
    is_side,
    numbers_at,
    read_table,
    show_concepts,
)

NARROWEST = 40
OF_MODELS = {"--text", "--tokens", "--vocab-size", "--json"}
OF_ONE_PROCESS = {
    "--layer", "--all", "--position", "--html", "--tolerance", "--ignore",
    "--table", "--cache", "--scores", "--quick",
}  # fmt: skip
OF_TWO = OF_ONE_PROCESS - {"--cache", "--scores"} | {"--gradients", "--dtype"}


@theirs_shown()
def diff(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        Argument(
            metavar="[CONCEPT] | LEFT RIGHT",
            help="One concept (embedding, attention, feed_forward, block, "
            "model or head; default: all) shows its source in both "
            "styles. Two models (a style, package.module:factory, "
            "path/to/file.py:factory, an expression after the colon, or "
            "exec:COMMAND, a program in any language) show "
            "their lines, paired by the values they compute. A model may be "
            "a recording: an .npz or .safetensors file of the tokens, and of "
            "arrays in the order in which they are computed.",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        Option(
            metavar="MODEL | MAKER | STEP",
            help="Compare a model's decoding with its cache with its full "
            "pass, position by position. --cache MODEL finds the cache. "
            "MODEL --cache MAKER takes a function that makes an empty cache: "
            "my_pkg.model:build --cache my_pkg:make_cache. MODEL --cache STEP "
            "takes a step of decoding: step(model, tokens, cache) gets None "
            "as the first cache, and returns scores and the cache.",
        ),
    ] = None,
    scores: Annotated[
        str | None,
        Option(
            metavar="LEFT | NAME",
            help="Compare two scorers of a text, LEFT RIGHT TEXT. A scorer is "
            "my_pkg:make_score, or a file of log-probabilities; TEXT is a "
            'file, or ids like "1,2,3". For two models: the array of a '
            "recording that holds the scores.",
        ),
    ] = None,
    width: Annotated[
        int | None,
        Option(
            help="Columns to use; with less than 120, one side is below the "
            "other. Default: the terminal's."
        ),
    ] = None,
    text: Annotated[
        str | None, Option(help="For two models: the text to run.")
    ] = None,
    tokens: Annotated[
        str | None,
        Option(
            help='For two models: the ids to run, like "1,2,3". Default: a '
            "text for two styles, else 16 ids drawn from a seed.",
        ),
    ] = None,
    tokenizer_name: options.TokenizerName = options.TOKENIZER,
    vocab_size: Annotated[
        int | None,
        Option(help="Number of tokens, if a model does not declare it."),
    ] = None,
    layer: Annotated[
        int | None, Option(help="For two models: show only this layer.")
    ] = None,
    whole: Annotated[
        bool,
        Option(
            "--all", help="For two models: also show lines of only one side."
        ),
    ] = False,
    position: Annotated[
        int | None,
        Option(
            help="For two models: also show the first numbers of each value "
            "at this position of the text, counted from 0."
        ),
    ] = None,
    gradients: Annotated[
        bool,
        Option(
            "--gradients",
            help="For two models: also compare the gradients of the weights.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        Option(
            help=f"For two models: run both in {', '.join(DTYPES)}. Default: "
            "float64, if both run in it."
        ),
    ] = None,
    tolerance: Annotated[
        float,
        Option(
            help="For two models: a difference up to this share of a value's "
            "largest number passes as rounding."
        ),
    ] = 0.0,
    ignore: Annotated[
        list[str] | None,
        Option(
            help="Leave out arrays of a recording with this name, or with "
            "this word in it; may be repeated.",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        Option(
            help='A JSON file of {"left": "right"}: names of arrays, modules '
            "or lines on the left, with those on the right; {i} is the number "
            "of each layer.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="For two models: compare only the first text. By default, "
            "also compare the scores on longer texts, special ids and "
            "several rows, with redrawn zeros and ones, and in train mode.",
        ),
    ] = False,
    json_file: options.Json = None,
    html_file: Annotated[
        Path | None,
        Option(
            "--html",
            help="For two models: also write a page that shows both step by "
            "step.",
        ),
    ] = None,
) -> None:
    """Show two implementations side by side.

    For two models, the exit status is 0 if they agree in everything that was
    compared, and 1 if they differ. The last line says what was compared, or
    where they first differ. The same holds for one model with --cache. In a
    terminal, a long source opens in a pager ($PAGER, or less).
    """
    if width is not None:
        whole_number("--width", width, at_least=NARROWEST)
    names = names or []
    if scores and not (len(names) == 2 and is_side(names[1])):
        names = [scores, *names]
        same = diff_of_scores(names, tokenizer_name, tolerance, json_file)
        raise typer.Exit(not same)
    if len(names) > 2:
        raise ValueError(f"diff takes two models, got {len(names)}")
    on_stdout = json_file == STDOUT
    console = Console(highlight=False, width=width, stderr=on_stdout)
    if cache and len(names) > 1:
        raise ValueError(f"--cache takes one model, got {len(names)}")
    maker = cache if names else None
    if maker and ":" not in maker:
        raise ValueError(
            f"--cache takes a function that makes a cache, as "
            f"my_pkg:make_cache, got {maker!r}"
        )
    if cache and not names:
        names = [cache]
    given = given_options(context).keys()
    if len(names) < 2:
        _refuse(
            given & (OF_TWO if cache else OF_TWO | OF_MODELS), "two models"
        )
        if not cache:
            show_concepts(console, names)
            return
    require_parent(json_file)
    require_parent(html_file)
    require_different({"json": json_file, "html": html_file})
    from ..comparison.page.render import render_diff

    if not 0 <= tolerance < 1:
        raise ValueError(f"--tolerance must be from 0 to 1, got {tolerance}")
    from ..running.ranks import current

    ids, text_of = choose_tokens(names, text, tokens, tokenizer_name)
    wanted = dtype and choose_dtype(dtype, DTYPES)
    if current() is not None:
        _refuse(given & OF_ONE_PROCESS, "a single process")
        same = diff_of_ranks(
            names, ids, vocab_size, wanted, gradients, json_file
        )
        raise typer.Exit(not same)
    if cache:
        same = decode(
            console, names[0], maker, ids, text_of, vocab_size, json_file
        )
        raise typer.Exit(not same)
    found = diff_values(
        names,
        ids,
        vocab_size=vocab_size,
        dtype=wanted,
        tolerance=tolerance,
        gradients=gradients,
        ignore=ignore or (),
        scores=scores,
        table=table and read_table(table),
        quick=quick,
    )
    if layer is not None and layer not in found.layers:
        raise ValueError(
            f"no layer {layer}: the models have {len(found.layers)} layers"
        )
    numbers = {} if position is None else numbers_at(found, position)
    found.show(console, layer, whole, numbers)
    if json_file is not None:
        write_json(json_file, {"models": names} | found.to_json())
    if html_file is not None:
        write_atomically(html_file, render_diff(found, text_of))
        console.print(f"page: {html_file}", soft_wrap=True, markup=False)
    if not found.same:
        raise typer.Exit(1)


def _refuse(given: Iterable[str], words: str) -> None:
    """Raise ValueError for the first given option, which requires `words`."""
    for option in sorted(given):
        raise ValueError(f"{option} requires {words}")
