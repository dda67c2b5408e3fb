"""A text has the scores that it has within a longer one."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ..check import Budget, Round, SkipCheck, Subject, check
from ..copies import precise
from ..larger_weights import both
from ..rounding import dtype_name, floor, gaps, real_gap
from ..tokens import SHORT, draw, rows_at_once, splits_to_try
from ..ways import PREFIX, ways_of


@check(
    calls=160,
    rows=20,
    share=1,
    implied_by=("check_determinism", "check_causality"),
)
def check_prefix_consistency(subject: Subject, budget: Budget) -> str:
    """model(x[:, :t]) equals model(x)[:, :t].

    Why: generation feeds prefixes; a model that sees the length of its
    input was trained on other scores than it generates from.
    How: all prefixes at lengths to 16, some of the longest; shapes differ,
    so only what stays when weights are nudged counts.
    Reports: ggml-org/llama.cpp 4479, tokens one at a time or all at once
    give different logits.
    """
    longest = subject.block_size
    if longest < 2:
        raise SkipCheck("one token has no prefix")
    subject.require_no_noise()
    subject.require_no_state()
    generator = subject.generator()
    rounds = _rounds(subject, budget, generator)
    for round, prefixes in budget.affordable(rounds):
        _compare(round, prefixes, generator)
    return f"prefixes of lengths 2 to {longest}"


def _rounds(
    subject: Subject, budget: Budget, generator: torch.Generator
) -> Iterator[Round]:
    """Yield lengths and their prefixes: in eval mode, with larger weights."""
    longest, short = subject.block_size, subject.lengths.fit(SHORT)
    fresh, *enlarged = both(subject, budget)
    sizes = [(fresh, time, time) for time in subject.fit(2, 5, SHORT, 33)]
    sizes += [(variant, short, short) for variant in enlarged]
    for way in ways_of(PREFIX, subject)[1:]:
        sizes.append((fresh.run_as(way), short, short))
    if longest > 33:
        sizes.append((precise(subject, budget, longest), longest, 4))
    for variant, time, count in sizes:
        splits = splits_to_try(time, generator, count)
        prefixes = tuple(filter(subject.lengths.accepts, splits))
        rows = min(2, rows_at_once(subject.vocab_size, time))
        if prefixes:
            yield Round(variant, time, prefixes, rows, apart=True, share=1 / 2)


def _compare(
    round: Round, prefixes: list[int], generator: torch.Generator
) -> None:
    variant, time = round.variant, round.time
    vocab = variant.subject.vocab_size
    tokens = draw(vocab, round.rows, time, generator)

    def whole_text(split: int) -> Tensor:
        return variant.scores(tokens)[:, :split]

    def alone(split: int) -> Tensor:
        return variant.scores(tokens[:, :split])

    whole = variant.scores(tokens)
    moved = {s: float(gaps(alone(s), whole[:, :s]).max()) for s in prefixes}
    apart = [s for s in prefixes if moved[s] > floor(whole)]
    for split in sorted(apart, key=lambda s: -moved[s])[:3]:
        gap = real_gap(
            variant.model, partial(whole_text, split), partial(alone, split)
        )
        if gap is not None:
            raise AssertionError(
                f"position {gap.at[1]} depends on the length: alone, the "
                f"first {split} of {time} tokens give it scores that differ "
                f"by {gap.size:.2g} ({dtype_name(whole.dtype)}"
                f"{variant.conditions}; rounding there is "
                f"{gap.noise:.1g})"
            )
