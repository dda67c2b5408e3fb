"""Decoding with a cache is the same function."""

from ...running.errors import SkipCheck
from ...tracing.pieces import Decoder, compare_generate
from ..check import Subject, check


@check(share=1, implied_by=("check_causality",))
def check_cache(subject: Subject) -> str:
    """Decoding with a cache, in any split, equals the full forward.

    Why: a cache that is one position off answers fluently, and wrongly.
    How: a text token by token, whole and in pieces, in several rows; two in
    turns, and one after another with the same first row; rows that begin with
    padding; a token past the end; a plain pass after decoding; in bfloat16. A
    cache may refuse pieces of several tokens behind the first. The convention
    is found by signature and state; where none is, the model's own generate
    is compared with and without its cache.
    Reports: pytorch/executorch 2010, rotary positions from 0 at each call.
    """
    subject.require_no_state()
    if getattr(subject.builder.build(), "can_cache_kv", True) is False:
        raise SkipCheck("the model says can_cache_kv=False")
    decoder = Decoder(subject)
    if decoder.convention is None:
        return compare_generate(subject, decoder.reason)
    subject = decoder.subject  # of as many rows as the cache has room for
    subject.require_no_noise()
    decoder.require_reset(subject.lengths.fit(4), subject.generator())
    decoder.require_plain(subject.lengths.fit(4), subject.generator())
    generator, longest = subject.generator(), subject.block_size
    time, told = subject.lengths.fit(7), ""
    with subject.budget.part("positions given", time):
        told = decoder.compare_positions(time, generator)

    for batch in sorted({*map(subject.fit_rows, (1, 3, 5))}):
        for time in subject.fit(1, 7, 16):
            with subject.budget.part(f"{batch} rows", time):
                ids = decoder.draw(batch, time, generator)
                decoder.compare(ids, _splits(time))
    if longest > 16:
        half = longest // 2
        tail = [1] * min(4, longest - half - 1)
        rest = longest - half - sum(tail)
        with subject.budget.part("the longest text", longest):
            row = decoder.draw(1, longest, generator)
            decoder.compare(row, [[half, *tail, rest]])
            decoder.require_an_end(decoder.draw(1, longest + 1, generator))
    time = subject.lengths.fit(8)
    with subject.budget.part("two texts", time):
        decoder.compare_two_texts(time, generator)
        decoder.compare_padded(time, generator)
        decoder.require_half(time, generator)
    refused = ""
    if decoder.most is not None:
        refused = f"; pieces of more than {decoder.most} tokens are refused"
        refused += ", and after the first of more than one" * decoder.then_one
    return (
        f"decoding: {decoder.convention.says}{told}: lengths to "
        f"{subject.budget.reached}, one by one, whole and in pieces"
        f"{refused}{decoder.note}"
    )


def _splits(time: int) -> list[list[int]]:
    splits = [[time], [1] * time]
    if time > 2:
        splits += [[time // 2, *[1] * (time - time // 2)]]
        splits += [[1, time - 1], [time - 1, 1], [time // 2, -(-time // 2)]]
    return splits
