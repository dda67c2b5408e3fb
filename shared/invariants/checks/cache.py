"""Decoding with a cache is the same function."""

import torch

from ...running.decoding import Decoder
from ...running.errors import SkipCheck
from ...running.model.sizes import WINDOW, all_declared
from ...running.program import Program
from ...running.tokens import SHORT
from ...tracing.pieces import CacheComparison, compare_generate
from ..check import Subject, check

STEPS = 256  # tokens of a long text that are fed one by one, at most
CHUNKS = 3, 20  # tokens of a piece: a chunk wraps around in a ring of 32
MEMO = 24  # tokens of texts that have some tokens in common


@check(share=1, implied_by=("check_causality",))
def check_cache(subject: Subject) -> str:
    """Decoding with a cache, in any split, equals the full forward.

    Why: a cache that is one position off answers fluently, and wrongly.
    How: a text token by token, whole and in pieces, in several rows; a long
    one token by token, up to the first 256, and in chunks that divide neither
    it nor a window; two in turns, and one after another with the same first
    row, first tokens or last ones; rows that begin with
    padding; a token past the end; a plain pass after decoding; in bfloat16. A
    cache may refuse pieces of several tokens behind the first. The convention
    is found by signature and state; where none is, the model's own generate
    is compared with and without its cache.
    Reports: pytorch/executorch 2010, rotary positions from 0 at each call.
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
    subject = decoder.subject  # of as many rows as the cache has room for
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
        refused += ", and after the first of more than one" * decoder.then_one
    return (
        f"decoding: {decoder.convention.says}{told}: lengths to "
        f"{subject.budget.reached}, one by one{_apart(comparison)}, whole and "
        f"in pieces{refused}{comparison.note}"
    )


def _compare_long(
    comparison: CacheComparison, generator: torch.Generator
) -> None:
    """Feed long texts one by one, in chunks, and with a prompt."""
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
    """Say up to where texts were fed one by one, if not to the longest."""
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
