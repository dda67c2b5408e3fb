"""Show how a cache works: read a text in two pieces, then one token."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...agreement import largest_difference
from ...protocol import Style, cache_reader
from ...validation import dtype_name
from ..sources import read_part
from ..styles import Pair
from .folding import fold
from .glossaries import text_of
from .value_maps import packed

# How often to time the last token: fewer times if the model is slow. The page
# shows the median.
FEWEST_TIMED, MOST_TIMED = 3, 9
TIMED_SECONDS = 0.5


def pieces_of(count: int) -> list[int]:
    """Return the lengths of a text's pieces: two halves, then one token."""
    first = count // 2
    return [first, count - 1 - first, 1]


def read_in_pieces(pair: Pair, ids: Sequence[int]) -> dict[str, Any]:
    """Return both styles' keys and values, and the times of the last token."""
    sides = [
        _side(model, style, ids)
        for model, style in zip(pair.models, pair.styles, strict=True)
    ]
    cached = [i for i, side in enumerate(sides) if side]
    times = _times([pair.models[i] for i in cached], ids)
    for i, own in zip(cached, times, strict=True):
        sides[i] |= {
            "milliseconds": [1e3 * median(each) for each in own],
            "runs": len(own[0]),
        }
    return {"pieces": pieces_of(len(ids)), "sides": sides}


@torch.no_grad()
def _side(model: Any, style: Style, ids: Sequence[int]) -> dict[str, Any]:
    """Return tables of one style's keys and values after the last token.

    A style without a cache has no tables.
    """
    reader, cached = cache_reader(model), text_of(style, "cached")
    if reader is None or not cached:
        return {}
    tokens = _tokens(model, ids)
    layers = range(model.config.n_layer)
    cache, answers, kept = reader.init_cache(1), [], True
    tables: list[tuple[Tensor, ...]] = []
    for piece in tokens.split(pieces_of(len(ids)), 1):
        answers.append(reader.decode(piece, cache))
        now = [tuple(t.clone() for t in cached(cache, i)) for i in layers]
        # see whether a later piece changes the rows of earlier positions
        kept &= all(
            new[:, :, : old.size(2)].equal(old)
            for before, after in zip(tables, now, strict=False)
            for old, new in zip(before, after, strict=True)
        )
        tables = now
    whole = model.log_probs(tokens)
    return {
        "tables": [[*map(_packed, two)] for two in tables],
        "heads": model.config.n_head,
        "kept": kept,
        "apart": largest_difference(torch.cat(answers, 1), whole),
        "dtype": dtype_name(whole.dtype),
    }


def _packed(table: Tensor) -> str:
    """Pack a table of positions by features, with heads side by side."""
    rows = table[0].transpose(0, 1).flatten(1)
    return packed(rows.float().cpu())


@torch.no_grad()
def _times(
    models: Sequence[Any], ids: Sequence[int]
) -> list[tuple[list[float], list[float]]]:
    """Return each model's seconds for the last token, with and without cache.

    The models take turns, so that a slow moment of the machine affects all.
    """
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in models]
    start = perf_counter()
    for run in range(MOST_TIMED):
        if run >= FEWEST_TIMED and perf_counter() - start > TIMED_SECONDS:
            break
        for model, (with_cache, without) in zip(models, found, strict=True):
            reader, tokens = cache_reader(model), _tokens(model, ids)
            assert reader is not None
            cache = reader.init_cache(1)
            reader.decode(tokens[:, :-1], cache)
            last = partial(reader.decode, tokens[:, -1:], cache)
            with_cache.append(_timed(last))
            without.append(_timed(partial(model.log_probs, tokens)))
    return found


def _tokens(model: Any, ids: Sequence[int]) -> Int[Tensor, "1 time"]:
    return torch.tensor([[*ids]], device=next(model.parameters()).device)


def _timed(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def cache_sources(styles: Sequence[Style]) -> list[dict[str, Any] | None]:
    """Return, for each style, the source of the function that adds to a cache.

    Lines are folded as in the page's other sources. The lines that add to the
    cache are highlighted.
    """
    return [_source(style) for style in styles]


def _source(style: Style) -> dict[str, Any] | None:
    known = text_of(style, "CACHE_SOURCE")
    if not known:
        return None
    module, name, marks = known
    part: Any = sys.modules[f"{style.__name__}.{module}"]
    for word in name.split("."):
        part = getattr(part, word)
    found = read_part(part)
    (segment,) = found.segments
    lines = fold(segment.code, segment.line, {})
    lit = {
        segment.line + i
        for i, line in enumerate(segment.code.split("\n"))
        if any(mark in line for mark in marks)
    }
    return {"file": found.file, "line": segment.line, "name": name,
            "lines": lines, "lit": lit}  # fmt: skip
