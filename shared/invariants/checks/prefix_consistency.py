"""A text has the same scores as within a longer text."""

import math
from collections.abc import Iterator

import torch

from ...running.model.sizes import branches_on_length
from ...running.places import short_path
from ...running.rounding import floor, gaps
from ...running.tokens import SHORT, draw, rows_at_once, splits_to_try
from ...running.variant import Variant, both, gap_between, precise
from ...running.ways import PREFIX, cases_of
from ..check import SkipCheck, Subject, check


@check(
    share=1,
    implied_by=(
        "check_determinism",
        "check_causality",
        "check_batch_independence",
    ),
)
def check_prefix_consistency(subject: Subject) -> str:
    """model(x[:, :t]) equals model(x)[:, :t].

    Why: generation runs prefixes. If scores depend on the length of the input,
    generation uses other scores than training.
    How: all prefixes of texts up to 16 tokens are run, and some prefixes of
    the longest text. Unequal shapes round differently, so a difference counts
    only if it remains when weights change in their last bits.
    If it fails: look for positions counted from the end, a scale computed from
    the length, and padding to a multiple. If the code compares the length with
    a number that no tried text reaches, the check names this line. An example
    is a rotary embedding that stretches past its training length.
    Reports: issue ggml-org/llama.cpp 4479, other logits token by token.
    """
    longest = subject.block_size
    if longest < 2:
        raise SkipCheck("one token has no prefix")
    subject.require_no_look_ahead()
    subject.require_no_noise()
    subject.require_no_state()
    generator = subject.generator()
    for variant, time, count in _sizes(subject):
        with subject.budget.part(variant.case.name, time, 1 / 2):
            _compare(variant, time, count, generator)
    text = f"prefixes of lengths 2 to {subject.budget.reached}"
    return f"{text}{_not_tried(subject)}"


def _not_tried(subject: Subject) -> str:
    """Say for which longer, untried texts the code takes another branch."""
    model = precise(subject).model
    found = branches_on_length(model, longest=subject.block_size)
    most = subject.limit.value if subject.limit else math.inf
    for number, file, line, code in found:
        if number < most:
            place = f"{short_path(file)}:{line} `{code}`"
            return (
                f"; not tried: lengths past {number}, where {place} branches"
            )
    return ""


def _sizes(subject: Subject) -> Iterator[tuple[Variant, int, int]]:
    """Yield copies of the model, lengths, and how many prefixes to try."""
    longest, short = subject.block_size, subject.lengths.fit(SHORT)
    fresh, *enlarged = both(subject)
    yield from ((fresh, time, time) for time in subject.fit(2, 5, SHORT, 33))
    yield from ((variant, short, short) for variant in enlarged)
    for case in cases_of(PREFIX, subject)[1:]:
        yield fresh.run_as(case), short, short
    if longest > 33:
        yield precise(subject, longest), longest, 4


def _compare(
    variant: Variant, time: int, count: int, generator: torch.Generator
) -> None:
    subject, vocab = variant.subject, variant.subject.vocab_size
    splits = splits_to_try(time, generator, count)
    prefixes = [*filter(subject.lengths.accepts, splits)]
    if not prefixes:
        return
    tokens = draw(vocab, min(2, rows_at_once(vocab, time)), time, generator)

    whole = variant.scores(tokens)
    moved = {}
    for split in prefixes:
        alone = variant.scores(tokens[:, :split])
        moved[split] = float(gaps(alone, whole[:, :split]).max())
    apart = [s for s in prefixes if moved[s] > floor(whole)]
    for split in sorted(apart, key=lambda s: -moved[s])[:3]:
        first = slice(None), slice(split)
        gap = gap_between(
            (variant, tokens, first), (variant, tokens[first], ...)
        )
        if gap is not None:
            raise AssertionError(
                f"position {gap.at[1]} depends on the length: run alone, the "
                f"first {split} of {time} tokens give it scores that differ "
                f"by {gap.size:.2g} "
                f"{variant.precision(gap.dtype, gap.noise)}"
            )
