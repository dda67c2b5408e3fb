"""The order of what came before counts."""

import torch
from jaxtyping import Int
from torch import Tensor

from ..check import Budget, Round, SkipCheck, Subject, check
from ..larger_weights import both
from ..meeting.sizes import WINDOW, declared
from ..rounding import floor, gaps, is_real, minus, rounding
from ..tokens import draw, others, rows_at_once
from ..variant import Variant, build

CLEAR = 0.5  # share of the deviation of scores: no rounding is as large
ALIKE = 1e-5  # share of the effect of another id: less is no effect


@check(calls=14, rows=15, share=1)
def check_order_sensitivity(subject: Subject, budget: Budget) -> str:
    """Permuting earlier tokens changes the prediction.

    Why: without positions a model reads a bag of words; positions that start
    again after some, or are kept in a byte, are the same far apart.
    How: some permutation of short texts must move the last scores. Then, in
    the longest, the first token is swapped with those 1, 2, 4, 8, ... behind
    it: where that does nothing, though each of the two counts and a swap
    with the next token does something, two positions are one.
    Reports: Vaswani et al. 2017, section 3.5: without positions attention
    cannot make use of the order.
    """
    longest = subject.block_size
    if longest < 3:
        raise SkipCheck(f"needs three tokens, the longest is {longest}")
    subject.require_no_state()
    window = declared(build(subject, budget), WINDOW)
    if window is not None and window.value == 1:
        raise SkipCheck(f"the model declares {window}: no token has a past")
    found = _some_permutation(subject, budget)
    far = [1 << k for k in range((longest - 2).bit_length())]
    for at in _swapped_in_vain(subject, budget, far) or []:
        near = [s for s in (at - 1, at + 1) if 0 < s < longest - 1]
        if _swapped_in_vain(subject, budget, near) != []:
            return f"{found}; tokens 0 and {at} of {longest} may be swapped"
        raise AssertionError(
            f"at length {longest} the last scores do not change when tokens "
            f"0 and {at} are swapped, but for tokens 0 and {near[-1]} they "
            f"do: two positions are the same"
        )
    return found


def _swapped_in_vain(
    subject: Subject, budget: Budget, places: list[int]
) -> list[int] | None:
    """Return the places whose swap with the first token changes nothing.

    A place is left out if another id there changes nothing either. None is
    for no time.
    """
    time, vocab = subject.block_size, subject.vocab_size
    generator = subject.generator()
    for variant in both(subject, budget, time):
        for _ in range(3):
            calls = 1 + len(places)
            swaps = Round(
                variant, time, rows=1, calls=calls, name="swaps", share=1 / 2
            )
            if not places:
                return []
            if not budget.affords(swaps):
                return None
            text = draw(vocab, 1, time, generator)[0]
            text[places] = others(
                text[0].expand(len(places)), vocab, generator
            )
            rows = [_swapped(text, 0, s) for s in places]
            base, moved = _moved(variant, text, rows)
            least = max(base, ALIKE * max(moved))
            sizes = dict(zip(places, moved, strict=True))
            places = [s for s in places if sizes[s] <= least]
            rows = [
                text.index_fill(0, torch.tensor(s), text[0]) for s in places
            ]
            counts = _moved(variant, text, rows)[1] if rows else []
            places = [
                s
                for s, count in zip(places, counts, strict=True)
                if max(sizes[s], base) < ALIKE * count
            ]
    return places


def _moved(
    variant: Variant, text: Int[Tensor, "time"], rows: list[Tensor]
) -> tuple[float, list[float]]:
    """Return how far rounding and how far each row moves the last scores."""
    batch = torch.stack([text, *rows])
    parts = batch.split(rows_at_once(variant.subject.vocab_size, text.numel()))
    last = torch.cat([variant.scores(part)[:, -1] for part in parts])
    if not bool(torch.isfinite(last).all()):
        raise SkipCheck("scores are NaN or infinite: see check_finite")
    return floor(last), gaps(last[1:], last[:1].expand_as(last[1:])).tolist()


def _some_permutation(subject: Subject, budget: Budget) -> str:
    """Return how far a permutation moves the scores; raise if none does."""
    vocab, generator = subject.vocab_size, subject.generator()
    largest = 0.0
    for variant in both(subject, budget):
        for time in reversed(subject.fit(3, 8)):
            tokens = draw(vocab, 1, time, generator, False)[0]
            # two ids at least, however small the vocabulary
            tokens[time - 2] = others(tokens[time - 3], vocab, generator)
            swaps = [_swapped(tokens, at, at + 1) for at in (time - 3, 0)]
            backwards = torch.cat([tokens[:-1].flip(0), tokens[-1:]])
            batch = torch.stack([tokens, *swaps, backwards])

            def difference(
                batch: Tensor = batch, variant: Variant = variant
            ) -> Tensor:
                last = variant.scores(batch)[:, -1]
                return minus(last[1:], last[0].expand_as(last[1:]))

            scores = variant.scores(batch)
            size = float(difference().abs().max())
            largest = max(largest, size)
            clear = size > CLEAR * float(scores.std())
            if size > floor(scores) and (
                clear or is_real(variant.model, difference, rounding(scores))
            ):
                return f"the last scores move by {size:.2g}"
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
