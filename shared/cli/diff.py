"""gpt-duet diff: two implementations side by side, by source or by value."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from ..files import STDOUT, write_atomically, write_json
from ..validation import (
    did_you_mean,
    require_different,
    require_parent,
    whole_number,
)
from . import options

if TYPE_CHECKING:
    from ..comparison.values import ValueDiff
    from ..protocol import Style

NARROWEST = 40
TOKENS = 24  # of the default text that two styles are run on
STYLES = ("annotated", "mingpt_style")
RECORDINGS = (".npz", ".safetensors")
DTYPES = ("float64", "float32", "bfloat16", "float16")


def diff(
    names: Annotated[
        list[str] | None,
        Argument(
            metavar="[CONCEPT] | LEFT RIGHT",
            help="A concept (embedding, attention, feed_forward, block, "
            "model or head; default: all of them): its source in both "
            "styles. Two models (a style, package.module:factory, "
            "path/to/file.py:factory, or an expression after the colon): "
            "their lines, paired by the values they compute. One may be a "
            "recording: an .npz or .safetensors of arrays in their order, "
            "with the tokens.",
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
    gradients: Annotated[
        bool,
        Option(
            "--gradients",
            help="For two models: compare the gradients of the weights, too.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        Option(
            help=f"For two models: run both in {', '.join(DTYPES)}. Default: "
            "float64 where both run there."
        ),
    ] = None,
    tolerance: Annotated[
        float,
        Option(
            help="For two models: a difference up to this share of a value's "
            "largest number passes as rounding."
        ),
    ] = 0.0,
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
            ("gradients", gradients or None),
            ("dtype", dtype),
            ("tolerance", tolerance or None),
        ):
            if value is not None:
                raise ValueError(f"--{option} goes with two models")
        show_concepts(console, names)
        return
    require_parent(json_file)
    require_parent(html_file)
    require_different({"json": json_file, "html": html_file})
    from ..comparison.page.render import render_diff
    from ..comparison.values.terminal import show_found

    if not 0 <= tolerance < 1:
        raise ValueError(f"--tolerance must be from 0 to 1, got {tolerance}")
    ids, text_of = choose_tokens(names, text, tokens, tokenizer_name)
    found = diff_values(
        names,
        ids,
        vocab_size=vocab_size,
        dtype=choose_dtype(dtype),
        tolerance=tolerance,
        gradients=gradients,
    )
    if layer is not None and layer not in found.layers:
        raise ValueError(
            f"there is no layer {layer}: {len(found.layers)} in all"
        )
    show_found(console, found, layer, whole)
    if json_file is not None:
        write_json(json_file, {"models": names} | found.to_json())
    if html_file is not None:
        write_atomically(html_file, render_diff(found, text_of))
        console.print(f"page: {html_file}", soft_wrap=True, markup=False)
    if not found.same:
        raise typer.Exit(1)


def show_concepts(console: Console, names: Sequence[str]) -> None:
    """Show the source of a concept, or of all of them, in both styles."""
    from ..comparison.sources import concept_names, pair_sources
    from ..comparison.terminal import show_sources
    from ..protocol import load_style

    styles = load_style(STYLES[0]), load_style(STYLES[1])
    known = concept_names(*styles)
    if names and names[0] not in known:
        if ":" in names[0] or _style(names[0]):
            raise ValueError(
                f"a second model is missing: diff {names[0]} RIGHT"
            )
        raise ValueError(
            f"no concept {names[0]!r}{did_you_mean(names[0], known)}; there "
            f"is {', '.join(known)}"
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
    from ..comparison.text import token_text
    from ..tokenization.texts import default_text
    from ..tokenization.tokenizers import DEFAULT, load_tokenizer
    from .choices import require_text

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


def choose_dtype(name: str | None) -> Any:
    """Return the dtype of a name, None for none."""
    import torch

    if name is not None and name not in DTYPES:
        words = f"--dtype must be one of {', '.join(DTYPES)}"
        raise ValueError(f"{words}, got {name!r}")
    return name and getattr(torch, name)


def load_side(name: str, vocab_size: int | None) -> Any:
    """Return a model, or the path of a recording."""
    from ..targets import load_target

    path = Path(name)
    if path.suffix not in RECORDINGS or ":" in name:
        return load_target(name, vocab_size)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return path


def diff_values(
    names: Sequence[str],
    ids: list[int] | None,
    *,
    vocab_size: int | None,
    **settings: Any,
) -> "ValueDiff":
    """Run two models, two styles from one set of weights.

    An exception of a user's code is printed as theirs.
    """
    import torch

    from ..checkpoint import SMALL_MODEL, load_checkpoint
    from ..comparison.values import diff_by_value
    from ..importing import first_on_path, show_theirs

    styles = [style for name in names if (style := _style(name))]
    sizes = _default_sizes(names, vocab_size) if len(styles) == 1 else ""
    if len(styles) < 2:
        left, right = (load_side(name, vocab_size) for name in names)
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
                **settings,
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
    from ..names import package_of
    from ..targets import STYLE_SIZES

    (name,) = filter(_style, names)
    model = f"{package_of(name)}.model:build_model(GPTConfig(...))"
    sizes = STYLE_SIZES | ({"vocab_size": vocab_size} if vocab_size else {})
    shown = ", ".join(f"{key} {size}" for key, size in sizes.items())
    return (
        f"; the sizes of {name} are defaults ({shown}): --vocab-size "
        f'sets its vocabulary, an expression all sizes, as "{model}"'
    )


def _style(name: str) -> "Style | None":
    from ..protocol import load_style

    if ":" in name or name.endswith(".py"):
        return None
    try:
        return load_style(name)
    except ValueError:
        return None
