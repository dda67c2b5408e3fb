"""Draw tokens; choose lengths, and splits of a text into past and future."""

from collections.abc import Iterable
from itertools import groupby

import torch
from jaxtyping import Int
from torch import Tensor

from .model.sizes import TILES, WINDOW, all_declared, numbers_in_code

SHORT = 16  # up to this length every split is tried
SPLITS = 24  # least number of splits of a longer sequence
NUMBERS = 8  # most integers in a model's code that become lengths to try

TOKENS_AT_ONCE = 2048
BYTES_AT_ONCE = 1 << 28


def rows_at_once(vocab: int, time: int) -> int:
    """Return how many sequences fit in one call, within the memory budget."""
    # at most 8 bytes a score, for two tensors of scores and their difference
    by_scores = BYTES_AT_ONCE // (time * vocab * 8)
    return max(1, min(TOKENS_AT_ONCE // time, by_scores))


def draw(
    vocab: int,
    batch: int,
    time: int,
    generator: torch.Generator,
    repeats: bool = True,
) -> Int[Tensor, "batch time"]:
    """Draw ids; without `repeats`, all ids of a row differ if possible."""
    if repeats or vocab < time:
        return torch.randint(vocab, (batch, time), generator=generator)
    rows = [torch.randperm(vocab, generator=generator) for _ in range(batch)]
    return torch.stack(rows)[:, :time]


def others(
    tokens: Int[Tensor, "*shape"], vocab: int, generator: torch.Generator
) -> Int[Tensor, "*shape"]:
    """Draw ids that differ from the given ids at every position."""
    shift = torch.randint(1, vocab, tokens.shape, generator=generator)
    return (tokens + shift) % vocab


def lengths_to_try(model: object, longest: int) -> list[int]:
    """Return lengths over SHORT: the longest length, and lengths near edges.

    Edges are powers of two, where kernels have tiles, and each window or tile
    that the model declares. Numbers in the model's code are also edges,
    because a branch may compare the length with them.
    """
    powers = [1 << k for k in range(5, longest.bit_length())]
    lengths = {longest, longest - 1}
    lengths |= {power + d for power in powers for d in (-1, 0, 1)}
    for window in all_declared(model, WINDOW + TILES):
        w = window.value
        lengths |= {w - 1, w, w + 1, 2 * w + 1}
    near = [n for n in numbers_in_code(model) if SHORT < n <= longest]
    lengths |= {n + d for n in near[:NUMBERS] for d in (-1, 0, 1)}
    return sorted(t for t in lengths if SHORT < t <= longest)


def splits_to_try(
    time: int, generator: torch.Generator, count: int = SPLITS
) -> list[int]:
    """Return all splits of a text, or some: ends, edges and random ones."""
    if time - 1 <= count:
        return list(range(1, time))
    chosen = {1, time - 1}
    if count >= SPLITS:
        edges = [1 << k for k in range(1, time.bit_length())]
        near = {e + d for e in edges for d in (-1, 0, 1)}
        chosen |= {s for s in near if 1 <= s < time}
    drawn = (torch.randperm(time - 1, generator=generator) + 1).tolist()
    least = max(count, len(chosen) + 2)
    return sorted([*dict.fromkeys([*chosen, *drawn])][:least])


def runs(lengths: Iterable[int]) -> list[list[int]]:
    """Group lengths in order: [5, 9] means 5 to 9, and [2] means 2."""
    ends: list[list[int]] = []
    numbered = enumerate(sorted({*lengths}))
    for _, group in groupby(numbered, lambda pair: pair[1] - pair[0]):
        run = [n for _, n in group]
        ends += [[run[0], run[-1]]] if len(run) > 2 else [[n] for n in run]
    return ends


def spans(lengths: Iterable[int]) -> str:
    """Return lengths as text: "2, 3, 5-9"."""
    return ", ".join("-".join(map(str, run)) for run in runs(lengths))
