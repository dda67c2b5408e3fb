"""Decoding with a cache gives the same scores."""

import torch

from ...running.decoding import Decoder
from ...running.errors import SkipCheck
from ...running.model.sizes import WINDOW, all_declared
from ...running.program import Program
from ...running.tokens import SHORT
from ...tracing.pieces import CacheComparison, compare_generate
from ..check import Subject, check

STEPS = 256  # most tokens of a long text that are fed one by one
# tokens of a chunk; chunks of 20 wrap around in a ring buffer of 32
CHUNKS = 3, 20
MEMO = 24  # tokens that two texts have in common


@check(share=2, implied_by=("check_causality",))
def check_cache(subject: Subject) -> str:
    """Decoding with a cache, in any split, equals the full forward.

    Why: with a cache that is one position off, answers are fluent but wrong.
    How: texts are decoded token by token, whole, and in pieces, in batches of
    1, 3 and 5 rows. A long text is decoded in chunks, whose size divides
    neither the text nor a window. Its first 256 tokens are also decoded one by
    one. Two texts are decoded in turns, or one after the other with the same
    first row, first tokens or last tokens. The check also tries rows that
    begin with padding, a token past the end, a plain pass after decoding, and
    bfloat16. A cache that refuses later pieces of several tokens passes. From
    the model's signature and state, the check finds out how the model takes
    its cache. If that fails, it compares the model's own generate with and
    without cache.
    If it fails: the message has the first position that differs, its piece,
    and the module and line where decoding first differs from the full forward.
    Look at the positions and the mask of a piece that is not the first, at
    rows that begin with padding, and at state that one text leaves for the
    next. A plain pass must give the same scores after decoding, and a model
    that runs in bfloat16 must also decode in bfloat16. If the report names
    another way to decode than yours, declare yours with `cache=`.
    Reports: issue pytorch/executorch 2010, each call starts at position 0.
    """
    subject.require_no_state()
    subject.require_no_look_ahead()
    if getattr(subject.builder.build(), "can_cache_kv", True) is False:
        raise SkipCheck("the model says can_cache_kv=False")
    program = subject.builder.given
    if isinstance(program, Program) and not program.has_cache:
        raise SkipCheck("the program's first line does not say cache")
    decoder = Decoder(subject)
    if decoder.convention is None:
        return compare_generate(subject, decoder.reason)
    comparison = CacheComparison(decoder)
    # this subject gives a call at most as many rows as the cache holds
    subject = decoder.subject
    subject.require_no_noise()
    comparison.require_reset(subject.lengths.fit(4), subject.generator())
    comparison.require_plain(subject.lengths.fit(4), subject.generator())
    generator, longest = subject.generator(), subject.block_size
    time, told = subject.lengths.fit(7), ""
    with subject.budget.part("positions given", time):
        told = comparison.compare_positions(time, generator)

    for batch in sorted({*map(subject.fit_rows, (1, 3, 5))}):
        for time in subject.fit(1, 7, 16):
            with subject.budget.part(f"{batch} rows", time):
                ids = decoder.draw(batch, time, generator)
                comparison.compare(ids, _splits(time))
    if longest > SHORT:
        _compare_long(comparison, generator)
    time = subject.lengths.fit(MEMO)
    with subject.budget.part("texts alike", time, 1 / 2):
        comparison.compare_alike(time, generator)
    time = subject.lengths.fit(8)
    with subject.budget.part("two texts", time):
        comparison.compare_two_texts(time, generator)
        comparison.compare_padded(time, generator)
        comparison.require_half(time, generator)
    refused = ""
    if decoder.most is not None:
        refused = f"; pieces of more than {decoder.most} tokens are refused"
        refused += ", and later pieces of more than one" * decoder.then_one
    return (
        f"decoding: {decoder.convention.says}{told}: lengths to "
        f"{subject.budget.reached}, one by one{_apart(comparison)}, whole and "
        f"in pieces{refused}{comparison.note}"
    )


def _compare_long(
    comparison: CacheComparison, generator: torch.Generator
) -> None:
    """Feed long texts in single tokens, in chunks, and after a prompt."""
    decoder = comparison.decoder
    subject, longest = decoder.subject, decoder.subject.block_size
    steps = min(longest, STEPS)
    with subject.budget.part("one by one", steps, 2 / 3):
        comparison.compare(decoder.draw(1, steps, generator), [[1] * steps])
    row = decoder.draw(1, longest, generator)
    said = [w.value for w in all_declared(decoder.model, WINDOW)]
    sizes = {*CHUNKS, *(w - w // 3 for w in said)}
    few = range(2, longest)
    with subject.budget.part("chunks", longest, 1 / 2):
        chunks = [_chunks(longest, n) for n in sorted(sizes) if n in few]
        comparison.compare(row, chunks)
    half = longest // 2
    tail = [1] * min(4, longest - half - 1)
    rest = longest - half - sum(tail)
    with subject.budget.part("the longest text", longest):
        comparison.compare(row, [[half, *tail, rest]])
        comparison.require_an_end(decoder.draw(1, longest + 1, generator))


def _apart(comparison: CacheComparison) -> str:
    """Say how much of the longest text was fed one by one, if not all."""
    most = comparison.stepped
    reached = comparison.decoder.subject.budget.reached
    return f" to {most}" * (most < reached)


def _chunks(time: int, size: int) -> list[int]:
    whole, rest = divmod(time, size)
    return [size] * whole + [rest] * (rest > 0)


def _splits(time: int) -> list[list[int]]:
    splits = [[time], [1] * time]
    if time > 2:
        splits += [[time // 2, *[1] * (time - time // 2)]]
        splits += [[1, time - 1], [time - 1, 1], [time // 2, -(-time // 2)]]
    return splits
