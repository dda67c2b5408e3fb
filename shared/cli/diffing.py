"""Find the models, recordings and tokens for gpt-duet diff, and run it."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from ..console import printable
from ..files import write_json
from ..validation import did_you_mean

if TYPE_CHECKING:
    from ..comparison.values import ValueDiff
    from ..comparison.values.terminal import Numbers
    from ..protocol import Style

NUMBERS = 6  # first numbers of a value to show at one position
TOKENS = 24  # tokens of the default text for two styles
TINY_WEIGHTS = "the weights of the tiny model: another is an expression"
STYLES = ("annotated", "mingpt_style")
RECORDINGS = (".npz", ".safetensors")


def show_concepts(console: Console, names: Sequence[str]) -> None:
    """Show both styles' source of one concept (attention, ...) or of all."""
    from ..comparison.sources import (
        concept_names,
        pair_sources,
        parts_named,
    )
    from ..comparison.terminal import show_sources
    from ..protocol import load_style

    styles = load_style(STYLES[0]), load_style(STYLES[1])
    known = concept_names(*styles)
    sources = pair_sources(*styles)
    # the name may be that of a part of a concept, such as the norm
    if names and names[0] not in known:
        sources[names[0]] = parts_named(sources, names[0])
    if names and not sources[names[0]]:
        if ":" in names[0] or _style(names[0]):
            raise ValueError(
                f"a second model is missing: diff {names[0]} RIGHT"
            )
        raise ValueError(
            f"no concept {names[0]!r}{did_you_mean(names[0], known)}; give "
            f"one of {', '.join(known)}, or a part, such as norm"
        )
    # options for the pager less, which otherwise would not show colours
    os.environ.setdefault("LESS", "-FRX")
    show_sources(console, STYLES, {c: sources[c] for c in names or known})


def choose_tokens(
    names: Sequence[str],
    text: str | None,
    tokens: str | None,
    tokenizer_name: str,
) -> tuple[list[int] | None, Callable[[int], str]]:
    """Return the ids to run, and a function that shows an id as text.

    The ids are None if they are to be drawn at random. By default, two styles
    run on a text that the small model was trained on.
    """
    from ..comparison.text import token_text
    from ..tokenization.texts import default_passage
    from ..tokenization.tokenizers import DEFAULT, load_tokenizer
    from .choices import require_text

    if text is not None and tokens is not None:
        raise ValueError("give --text or --tokens, not both")
    if tokens is not None:
        try:
            return [int(token) for token in tokens.split(",")], str
        except ValueError:
            raise ValueError(
                f'--tokens must be numbers like "1,2,3", got {tokens!r}'
            ) from None
    if text is not None:
        require_text("--text", text)
        tokenizer = load_tokenizer(tokenizer_name, text)
        return tokenizer.encode(text), partial(token_text, tokenizer)
    if all(map(_style, names)):
        tokenizer = load_tokenizer(DEFAULT)
        ids = tokenizer.encode(default_passage())[:TOKENS]
        return ids, partial(token_text, tokenizer)
    return None, str


def read_table(path: Path) -> dict[str, str]:
    """Read a JSON file that maps names in the left model to the right's."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except msgspec.ValidationError:
        raise ValueError(
            f'{path} must hold only {{"left": "right", ...}}'
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def is_side(name: str) -> bool:
    """Return whether an argument names a model or recording, not a text."""
    is_file = Path(name).suffix in RECORDINGS
    return is_file or ":" in name or _style(name) is not None


def load_side(name: str, vocab_size: int | None) -> Any:
    """Return a model, or the path of a recording."""
    from ..targets import load_target

    path = Path(name)
    if path.suffix not in RECORDINGS or ":" in name:
        return load_target(name, vocab_size)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return path


def load_sides(names: Sequence[str], vocab_size: int | None) -> list[Any]:
    """Return the models or recordings with these names.

    Two styles run with the weights of the small model. A style that is
    compared with a program runs with the weights of the tiny model.
    """
    import torch

    from ..checkpoint import SMALL_MODEL, TINY_MODEL, load_checkpoint
    from ..protocol import load_style
    from ..targets import PREFIX

    styles = [style for name in names if (style := _style(name))]
    ports = [name for name in names if name.startswith(PREFIX)]
    if len(styles) + len(ports) < len(names):
        return [load_side(name, vocab_size) for name in names]
    checkpoint = load_checkpoint(TINY_MODEL if ports else SMALL_MODEL)
    state = checkpoint.to(torch.device("cpu"), torch.float64)
    return [
        load_side(name, vocab_size)
        if name in ports
        else load_style(name).from_gpt2(state, checkpoint.config)
        for name in names
    ]


def diff_values(
    names: Sequence[str],
    ids: list[int] | None,
    *,
    vocab_size: int | None,
    **settings: Any,
) -> "ValueDiff":
    """Compare two models by value, and return the result."""
    from ..comparison.values import diff_by_value
    from ..targets import PREFIX

    styles = [*filter(_style, names)]
    sizes = ""
    if len(styles) == 1:
        sizes = _default_sizes(names, vocab_size)
        if any(name.startswith(PREFIX) for name in names):
            sizes = f"; compared with a program, a style has {TINY_WEIGHTS}"
    left, right = load_sides(names, vocab_size)
    try:
        found = diff_by_value(
            left,
            right,
            ids,
            vocab_size=vocab_size,
            names=(names[0], names[1]),
            **settings,
        )
    except ValueError as error:
        raise ValueError(f"{error}{sizes}") from error.__cause__
    if found.shares_nothing:
        raise ValueError(f"{found.sentence}{sizes}")
    return found


def diff_of_ranks(
    names: Sequence[str],
    ids: list[int] | None,
    vocab_size: int | None,
    dtype: Any,
    gradients: bool,
    json_file: Path | None,
) -> bool:
    """Compare a sharded model with its original; return whether they agree."""
    from ..distributed.diff import diff_sharded
    from ..running.ranks import first

    left, right = (load_side(name, vocab_size) for name in names)
    found = diff_sharded(
        left,
        right,
        ids,
        vocab_size=vocab_size,
        names=(names[0], names[1]),
        dtype=dtype,
        gradients=gradients,
    )
    print(printable(found.sentence))
    if json_file is not None and first():
        write_json(json_file, {"models": names} | found.to_json())
    return found.same


def numbers_at(found: "ValueDiff", position: int) -> "Numbers":
    """Return the first numbers of each value at a position, as text."""
    from ..comparison.values.layouts import as_table

    length = found.sides[0].tokens.size(-1)
    if not 0 <= position < length:
        raise ValueError(
            f"--position must be from 0 to {length - 1}, got {position}"
        )
    rows = found.rows()
    kept = [
        side.keep({row.order[i] for row in rows} - {-1})
        for i, side in enumerate(found.sides)
    ]
    numbers = {}
    for row in rows:
        on_right = row.left is None
        value = kept[on_right].get(row.order[on_right])
        table = None if value is None else as_table(value, length)[0]
        if table is not None and len(table) == length:
            first = [f"{number:.4g}" for number in table[position, :NUMBERS]]
            more = " ..." * (table.size(1) > NUMBERS)
            numbers[row.order] = "  ".join(first) + more
    return numbers


def decode(
    console: Console,
    name: str,
    maker: str | None,
    ids: list[int] | None,
    text_of: Callable[[int], str],
    vocab_size: int | None,
    json_file: Path | None,
) -> bool:
    """Compare cached decoding with the full pass; return whether they agree.

    `maker` is a target that makes an empty cache; None: the kit finds a cache.
    """
    from ..comparison.values.decoding import diff_cache
    from ..comparison.values.terminal import show_decoding

    (model,) = load_sides([name], vocab_size)
    make = load_side(maker, None) if maker else None
    found = diff_cache(model, ids, vocab_size=vocab_size, cache=make)
    show_decoding(console, found, text_of)
    if json_file is not None:
        write_json(json_file, {"model": name} | found.to_json())
    return found.same


def diff_of_scores(
    names: Sequence[str],
    tokenizer_name: str,
    tolerance: float,
    json_file: Path | None,
) -> bool:
    """Compare two scorers of a text; return whether they agree."""
    from ..scoring.scores import diff_scores
    from ..tokenization import load_tokenizer
    from ..tokenization.texts import read_text

    if len(names) not in (2, 3):
        raise ValueError(f"--scores takes LEFT RIGHT TEXT, got {len(names)}")
    ids = None
    if len(names) == 3:
        text, is_file = names[2], Path(names[2]).is_file()
        text = read_text(text) if is_file else text
        if re.fullmatch(r"[\d\s,]+", text):
            ids = [int(number) for number in re.findall(r"\d+", text)]
        elif is_file:
            ids = load_tokenizer(tokenizer_name, text).encode(text)
        else:
            raise ValueError(f"{text!r} is neither a file nor ids like 1,2,3")
    left, right = (load_side(name, None) for name in names[:2])
    both = names[0], names[1]
    found = diff_scores(left, right, ids, names=both, tolerance=tolerance)
    print(found.sentence)
    if json_file is not None:
        write_json(json_file, {"scorers": names} | asdict(found))
    return found.same


def _default_sizes(names: Sequence[str], vocab_size: int | None) -> str:
    """Return a note on a style's default sizes, and how to change them."""
    from ..names import package_of
    from ..targets import STYLE_SIZES

    (name,) = filter(_style, names)
    model = f"{package_of(name)}.model:build_model(GPTConfig(...))"
    sizes = STYLE_SIZES | ({"vocab_size": vocab_size} if vocab_size else {})
    shown = ", ".join(f"{key} {size}" for key, size in sizes.items())
    return (
        f"; the sizes of {name} are defaults ({shown}): set its vocabulary "
        f'with --vocab-size, or all sizes with an expression, as "{model}"'
    )


def _style(name: str) -> "Style | None":
    from ..protocol import load_style

    if ":" in name or name.endswith(".py"):
        return None
    try:
        return load_style(name)
    except ValueError:
        return None
