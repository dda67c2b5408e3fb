"""Which lengths and numbers of rows a model refuses: found by trying.

check_shape reports them; no other check stumbles over them.
"""

from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

from ..errors import ModelRaised
from ..model.sizes import ROWS, Lengths, before_first_position, declared
from ..subject import Subject
from ..tokens import SHORT, draw
from ..variant import Variant

# a model that accepts these lengths and the longest takes all
FEW = (1, 2, 3, 7)
MANY_ROWS = 64  # as many as the checks give at once, but for a few


def find_lengths(
    accepts: Callable[[int], bool], longest: int, known: int
) -> Lengths:
    """Return the lengths that a model accepts, as far as some of them show.

    One is known; none over the longest is tried.
    """
    accepts = cache(accepts)
    if all(accepts(t) for t in (*FEW, longest) if t <= longest):
        return Lengths(1, 1, longest)
    powers = [1 << k for k in range(5, longest.bit_length())]
    for some in (range(1, min(SHORT, longest) + 1), powers, [known]):
        taken = [t for t in some if accepts(t)]
        if taken:
            break
    step = min((b - a for a, b in pairwise(taken)), default=taken[0])
    least = low = taken[-1] - taken[-1] % step
    while least > step and accepts(least - step):
        least -= step
    end = longest - longest % step
    if accepts(end):
        return Lengths(least, step, end)
    longer = range(low + step, end, step)
    count = bisect(longer, False, key=lambda t: not accepts(t))
    return Lengths(least, step, low + count * step)


def find_refusals(
    subject: Subject, variant: Variant, batch: int, time: int
) -> Subject:
    """Find lengths and numbers of rows that are refused."""
    refused: dict[tuple[int, int], ModelRaised] = {}

    def answers(rows: int, length: int) -> bool:
        ids = draw(subject.vocab_size, rows, length, subject.generator())
        try:
            variant.scores(ids)
        except ModelRaised as error:
            refused[rows, length] = error
        return (rows, length) not in refused

    rows, longest = 1 if answers(1, time) else batch, subject.block_size
    refused.clear()
    lengths = find_lengths(lambda length: answers(rows, length), longest, time)
    refusals = []
    fewer = longest - before_first_position(variant.model, longest)
    if refused and lengths != Lengths(1, 1, fewer):
        refusals.append((refused[min(refused)], f"{lengths} are answered"))
    subject = replace(
        subject,
        lengths=lengths,
        block_size=lengths.longest,
        refusals=tuple(refusals),
    )
    refused.clear()
    length = lengths.fit(7)
    if answers(MANY_ROWS, length):
        return subject
    more = range(batch + 1, MANY_ROWS)
    count = bisect(more, False, key=lambda rows: not answers(rows, length))
    count += batch
    said = declared(variant.model, ROWS)
    if said is not None and said.value == count:
        note = f"at most {count} rows at once: {said}"
        return replace(subject, rows=count).noted(note)
    refusals.append((refused[min(refused)], f"{count} rows are answered"))
    return replace(subject, rows=count, refusals=tuple(refusals))
