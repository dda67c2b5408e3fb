"""The order of earlier tokens matters."""

from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from ...running.model.sizes import WINDOW, declared
from ...running.rounding import (
    floor,
    gaps,
    is_real,
    minus,
    require_finite,
    rounding,
)
from ...running.tokens import draw, others, rows_at_once
from ...running.variant import Variant, both, build
from ..check import SkipCheck, Subject, check

CLEAR = 0.5  # a change of this share of the scores' deviation is not rounding
COARSE = 1e-3  # a change of this share is not float32's rounding
# an effect below this share of another id's effect counts as none
EFFECT_SHARE = 1e-5
HEAVY_LENGTH = 64  # tokens of the texts that are swapped first


@check(share=2, implied_by=("check_causality",))
def check_order_sensitivity(subject: Subject) -> str:
    """Permuting earlier tokens changes the prediction.

    Why: without positions a model reads a bag of words. Positions that
    restart, or are stored in a byte, repeat far apart.
    How: some permutation of short texts must move the last scores. In the
    longest text the first token is swapped with the tokens 1, 2, 4, 8, ...
    after it. Neighbours at 8, 16, ... are swapped with each other. Two
    positions are equal if such a swap has no effect, although both tokens
    matter and a swap next to them has an effect.
    If it fails: positions are missing, are all the same, or start again after
    some tokens. Equal positions are found only if a swap of their tokens
    changes nothing at all. After a second layer the causal mask itself
    distinguishes them, and the check passes.
    Reports: Vaswani et al. 2017, section 3.5: attention has no order.
    """
    longest = subject.block_size
    if longest < 3:
        raise SkipCheck(f"needs three tokens, the longest is {longest}")
    subject.require_no_state()
    if subject.sees is not None:
        raise SkipCheck(f"{subject.sees.name} may hide the tokens from it")
    window = declared(build(subject), WINDOW)
    if window is not None and window.value == 1:
        raise SkipCheck(f"the model declares {window}: no token has a past")
    found = _some_permutation(subject)
    subject.budget.something_tried = True
    times = {min(longest, HEAVY_LENGTH)} if subject.heavy else set()
    for time in sorted({*times, longest}):
        vain = _same_positions(subject, time)
        if vain:
            return f"{found}; {vain}"
    return found


def _same_positions(subject: Subject, time: int) -> str:
    """Raise if two positions are equal, or name a pair without effect."""
    powers = [1 << k for k in range((time - 2).bit_length())]
    pairs = [(0, s) for s in powers]
    pairs += [(s, s + 1) for s in powers if 8 <= s < time - 2]
    for one, other in _swapped_in_vain(subject, pairs, time) or ():
        step = int(one > 0)  # shift both tokens, but not one at position 0
        near = [(one + d * step, other + d) for d in (-1, 1)]
        near = [(a, b) for a, b in near if a < b < time - 1]
        if _swapped_in_vain(subject, near, time) != []:
            return f"tokens {one} and {other} may be swapped"
        raise AssertionError(
            f"at length {time} the last scores do not change when tokens "
            f"{one} and {other} are swapped, but they change when tokens next "
            f"to them are swapped: two positions are the same"
        )
    return ""


def _swapped_in_vain(
    subject: Subject, pairs: list[tuple[int, int]], time: int
) -> list[tuple[int, int]] | None:
    """Return pairs of tokens whose swap has no effect.

    A pair is left out if no change of its second token has an effect.
    None means that time ran out.
    """
    # with a share of 0, swaps run only without a time limit
    share = 0 if subject.takes_seconds((1 + len(pairs)) * time) else 1 / 2
    vocab, generator = subject.vocab_size, subject.generator()
    with subject.budget.part("swaps", time, share):
        for variant in (v for v in both(subject, time) for _ in range(3)):
            if not pairs:
                break
            text = draw(vocab, 1, time, generator)[0]
            for one, other in pairs:
                text[other] = others(text[one], vocab, generator)
            rows = [_swapped(text, one, other) for one, other in pairs]
            base, moved = _moved(variant, text, rows)
            least = max(base, EFFECT_SHARE * max(moved))
            sizes = dict(zip(pairs, moved, strict=True))
            pairs = [pair for pair in pairs if sizes[pair] <= least]
            rows = [
                text.index_fill(0, torch.tensor(other), text[one])
                for one, other in pairs
            ]
            counts = _moved(variant, text, rows)[1] if rows else []
            pairs = [
                pair
                for pair, count in zip(pairs, counts, strict=True)
                if max(sizes[pair], base) < EFFECT_SHARE * count
            ]
        return pairs
    return None


def _differences(variant: Variant, batch: Tensor) -> Tensor:
    """Return the distance of each row's last scores from the first row's."""
    last = variant.scores(batch)[:, -1]
    return minus(last[1:], last[0].expand_as(last[1:]))


def _moved(
    variant: Variant, text: Int[Tensor, "time"], rows: list[Tensor]
) -> tuple[float, list[float]]:
    """Return how far rounding and each changed row move the last scores."""
    batch = torch.stack([text, *rows])
    parts = batch.split(rows_at_once(variant.subject.vocab_size, text.numel()))
    last = torch.cat([variant.scores(part)[:, -1] for part in parts])
    if not bool(torch.isfinite(last).all()):
        raise SkipCheck("scores are NaN or infinite: see check_finite")
    return floor(last), gaps(last[1:], last[:1].expand_as(last[1:])).tolist()


def _some_permutation(subject: Subject) -> str:
    """Return how far a permutation moves scores; raise if none does."""
    vocab, generator = subject.vocab_size, subject.generator()
    largest = share = 0.0
    for variant in both(subject):
        for time in reversed(subject.fit(3, 8)):
            tokens = draw(vocab, 1, time, generator, False)[0]
            # so that the text has at least two different ids
            tokens[time - 2] = others(tokens[time - 3], vocab, generator)
            swaps = [_swapped(tokens, at, at + 1) for at in (time - 3, 0)]
            backwards = torch.cat([tokens[:-1].flip(0), tokens[-1:]])
            batch = torch.stack([tokens, *swaps, backwards])
            difference = partial(_differences, variant, batch)
            scores = variant.scores(batch)
            size, deviation = float(difference().abs().max()), scores.std()
            largest = max(largest, size)
            share = max(share, size / float(deviation + 1e-30))
            if size > floor(scores) and (
                size > CLEAR * deviation
                or is_real(variant.model, difference, rounding(scores))
            ):
                return f"the last scores move by {size:.2g}"
    require_finite(scores)
    if share > COARSE:
        raise SkipCheck(
            f"permutations move the last scores by {largest:.1g}, as rounding "
            f"inside the model may"
        )
    replaced = others(tokens, vocab, generator)
    replaced[-1] = tokens[-1]
    least, sizes = _moved(variant, tokens, [replaced])
    if max(sizes) <= least:
        raise AssertionError(
            "no earlier token and no order of tokens changes the last scores: "
            "the past is not read at all"
        )
    raise AssertionError(
        f"no permutation of the earlier tokens moves the last scores by "
        f"more than rounding ({largest:.1g}): the model reads a bag of words"
    )


def _swapped(
    tokens: Int[Tensor, "time"], one: int, other: int
) -> Int[Tensor, "time"]:
    tokens = tokens.clone()
    tokens[[one, other]] = tokens[[other, one]]
    return tokens
