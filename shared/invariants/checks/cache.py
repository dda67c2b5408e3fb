"""Decoding with a cache is the same function."""

from ..check import Budget, Round, Subject, check
from ..decoding import CONVENTION, Decoder


@check(calls=200, rows=4, share=1)
def check_cache(subject: Subject, budget: Budget) -> str:
    """Decoding with a cache, in any split, equals the full forward.

    Why: a cache that is one position off answers fluently, and wrongly.
    How: a sequence token by token, whole and in pieces, in several rows; two
    in turns, and one after another with the same first row; rows that begin
    with padding, where a mask is taken; and a token past the end. A cache in
    the model's own call need go on with one token at a time only.
    Reports: pytorch/executorch 2010, rotary positions that start again at 0
    with each call.
    """
    subject.require_no_state()
    decoder = Decoder(subject, budget)
    subject.require_no_noise()
    generator, longest = subject.generator(), subject.block_size

    def has_time(name: str, time: int, rows: int, calls: int) -> bool:
        return budget.affords(
            Round(decoder.variant, time, (), rows, calls, name=name, share=1)
        )

    for batch in sorted({*map(subject.fit_rows, (1, 3, 5))}):
        for time in subject.fit(1, 7, 16):
            splits = _splits(time)
            if has_time(f"{batch} rows", time, batch, 1 + len(splits)):
                decoder.compare(decoder.draw(batch, time, generator), splits)
    if longest > 16:
        half = longest // 2
        tail = [1] * min(4, longest - half - 1)
        rest = longest - half - sum(tail)
        if has_time("", longest, 1, 3):
            row = decoder.draw(1, longest, generator)
            decoder.compare(row, [[half, *tail, rest]])
            decoder.require_an_end(decoder.draw(1, longest + 1, generator))
    time = subject.lengths.fit(8)
    if has_time("two texts", time, 6, 5 * time):
        decoder.compare_two_texts(time, generator)
        decoder.compare_padded(time, generator)
    how = decoder.name or " and ".join(CONVENTION)
    return (
        f"{how}: lengths to {longest}, one by one, whole and in pieces"
        f"{decoder.told}"
    )


def _splits(time: int) -> list[list[int]]:
    splits = [[time], [1] * time]
    if time > 2:
        splits += [[time // 2, *[1] * (time - time // 2)]]
        splits += [[1, time - 1], [time - 1, 1], [time // 2, -(-time // 2)]]
    return splits
