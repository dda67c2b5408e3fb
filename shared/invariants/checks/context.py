"""What came before counts, and counts the same however it is fed."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from ..errors import SkipCheck
from ..model.costs import spans
from ..model.sizes import WINDOW, all_declared
from ..model.subject import Subject
from ..model.tokens import (
    SHORT,
    SPLITS,
    draw,
    others,
    rows_at_once,
    splits_to_try,
)
from ..search.larger_weights import Searches
from ..search.leaks import Search
from ..search.tolerance import dtype_name, floor, gaps, real_gap
from ..search.trial import EVAL
from .embedding import gradients_at

FADED = 1e-10  # share of the largest influence below which memory fades


def check_prefix_consistency(subject: Subject) -> str:
    """model(x[:, :t]) equals model(x)[:, :t].

    Why: generation feeds prefixes; a model that sees the length of its
    input was trained on other scores than it generates from.
    How: all prefixes at lengths to 16, some of the longest; shapes differ,
    so only what stays when weights are nudged counts.
    Cost: some 50 short forwards and eight longer ones.
    Reports: ggml-org/llama.cpp 4479, tokens one at a time or all at once
    give different logits.
    """
    longest = subject.block_size
    if longest < 2:
        raise SkipCheck("one token has no prefix")
    subject.require_no_noise()
    generator = subject.generator()
    searches = Searches(subject)
    some = (2, 5, SHORT) if subject.heavy else (2, 5, SHORT, 33)
    for time in subject.fit(*some):
        _prefixes(searches.fresh, time, range(1, time), generator)
    if longest > 33:
        splits = splits_to_try(longest, generator, 4)
        search = Search(subject, subject.precise(long=True))
        _prefixes(search, longest, splits, generator)
    time = subject.lengths.fit(SHORT)
    for larger in searches.larger:
        _prefixes(larger, time, range(1, time), generator)
    return f"prefixes of lengths 2 to {longest}"


def _prefixes(
    search: Search,
    time: int,
    splits: Iterable[int],
    generator: torch.Generator,
) -> None:
    vocab = search.subject.vocab_size
    splits = [s for s in splits if search.subject.lengths.accepts(s)]
    rows = min(2, rows_at_once(vocab, time))
    if not search.has_time(time, rows, 1 + len(splits)):
        return
    tokens = draw(vocab, rows, time, generator)

    def whole_text(split: int) -> Tensor:
        return search.run(tokens)[:, :split]

    def alone(split: int) -> Tensor:
        return search.run(tokens[:, :split])

    whole = search.run(tokens)
    moved = {s: float(gaps(alone(s), whole[:, :s]).max()) for s in splits}
    apart = [s for s in splits if moved[s] > floor(whole)]
    for split in sorted(apart, key=lambda s: -moved[s])[:3]:
        gap = real_gap(
            search.model, partial(whole_text, split), partial(alone, split)
        )
        if gap is not None:
            raise AssertionError(
                f"position {gap.at[1]} depends on the length: alone, the "
                f"first {split} of {time} tokens give it scores that differ "
                f"by {gap.size:.2g} ({dtype_name(whole.dtype)}"
                f"{search.conditions(EVAL)}; rounding there is "
                f"{gap.noise:.1g})"
            )


def check_context_use(subject: Subject) -> str:
    """Every token so far can change the last output, the newest included.

    Why: a window one too short, a cache that drops the first token, or scores
    that come a step late cost quality and show nowhere else.
    How: each token of short sequences is replaced, several times, on the
    fresh model and with larger weights; of the longest sequence some tokens,
    by value or by gradient. A declared window may forget what is outside it.
    Cost: some ten batches.
    Reports: huggingface/transformers 39408, a sliding window off by one.
    """
    longest = subject.block_size
    windows = all_declared(subject.build(), WINDOW)
    window = min(windows, key=lambda w: w.value, default=None)
    generator = subject.generator()
    searches, reported = Searches(subject), ""
    for time in subject.fit(2, 3, 8, SHORT, longest):
        if time > SHORT:
            searches = Searches(subject, long=True)
        count = SPLITS if time <= SHORT else 6
        splits = splits_to_try(time, generator, count)
        columns = [*(split - 1 for split in splits), time - 1]
        if not searches.fresh.has_time(time, 1, 1 + len(columns)):
            continue
        used = _used(searches, time, columns, generator)
        unused = [s for s in columns if not used.get(s)]
        seen = [s for s in columns if s not in unused]
        if not unused:
            continue
        if window is not None and max(unused) < time - window.value:
            reported = (
                f"; at length {time} tokens up to {max(unused)} are outside "
                f"the declared {window}"
            )
            continue
        if (  # influence falls off towards the tokens that show none
            seen
            and max(unused) < min(seen)
            and used[min(seen)] < FADED * max(used[s] for s in seen)
        ):
            reported = (
                f"; at length {time} memory fades below rounding before "
                f"token {min(seen)}"
            )
            continue
        declared = f" (declared: {window})" if window else ""
        late = ", the newest: do they come a step late?"
        raise AssertionError(
            f"at length {time} the last scores never change with "
            f"{'token' if len(unused) == 1 else 'tokens'} {spans(unused)}"
            f"{declared}{late * (unused == [time - 1])}"
        )
    return f"every token tried, at lengths to {longest}{reported}"


def _used(
    searches: Searches,
    time: int,
    columns: list[int],
    generator: torch.Generator,
) -> dict[int, float]:
    """Return for each token how far it moves the last output; 0 is never."""
    used: dict[int, float] = {}
    for search in searches:
        vocab = search.subject.vocab_size
        for _ in range(8 if time <= SHORT else 3):
            left = [s for s in columns if not used.get(s)]
            if not left:
                return used
            at_once = min(len(left), search.rows_at_once(time))
            base = draw(vocab, 1, time, generator)
            replaced = others(base[0], vocab, generator)
            base_scores = search.run(base.repeat(at_once, 1))[:, -1]
            least = floor(base_scores)
            for first in range(0, len(left), at_once):
                part = [
                    left[min(first + i, len(left) - 1)] for i in range(at_once)
                ]
                rows = base.repeat(at_once, 1)
                rows[range(at_once), part] = replaced[part]
                moved = gaps(search.run(rows)[:, -1], base_scores)
                sizes = zip(part, moved.tolist(), strict=True)
                used |= {s: size for s, size in sizes if size > least}
        if all(used.get(s) for s in columns):
            return used
        # an influence below rounding shows in gradients
        tokens = draw(vocab, 1, time, generator)
        grads = gradients_at(search, tokens, [time - 1], generator)
        if grads is not None:
            # 0 of 0 is NaN, and more than nothing is none of infinity
            shares = (grads[0] / grads[0].max()).tolist()
            scale = max(used.get(s, 0.0) for s in columns) or 1.0
            for s in columns:
                if not used.get(s) and shares[s] > 0:
                    used[s] = shares[s] * scale
    return used
