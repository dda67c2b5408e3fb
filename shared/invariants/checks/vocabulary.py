"""The ends of the vocabulary."""

from itertools import product

import torch
from jaxtyping import Int
from torch import Tensor

from ...running.errors import NotFinite
from ...running.operations import functions_through
from ...running.ranks import current
from ...running.rounding import differ
from ...running.tokens import rows_at_once
from ...running.variant import Variant, doubled, larger, own, redraw_zeros
from ..check import Subject, check
from ..embedding import Lookups
from ..limits import on_cpu, refusal

SPARE = 128  # rows of a table beyond the vocabulary: padding to a multiple
ENDS_OF_IDS = 16  # of a heavy model, the first and the last ids are tried
EXCLUDED = 100  # a score so far below the highest leaves no probability
ALL_IDS = 1 << 36  # parameters times ids: up to here every id is tried


@check()
def check_vocabulary(subject: Subject) -> str:
    """Every id in [0, vocab) works, and an id outside raises.

    Why: an id that wraps around or is clamped is another token's text.
    How: all ids, or of a large model some; then vocab, vocab + 100 and -1 in
    the first and last place, behind spare rows of the table; on the CPU. Of
    two scores that never move no training can tell the ids apart.
    Reports: karpathy/nanoGPT pads to 50304 ids, some of no tokenizer.
    """
    vocab = subject.vocab_size
    generator = subject.generator()
    variant = on_cpu(subject)
    ids = _ids_to_try(subject, generator)
    time = subject.lengths.fit(64)
    # the last row is filled up with the first ids
    rows = ids.repeat(time)[: time * -(-len(ids) // time)].view(-1, time)
    for part in rows.split(max(1, (1 << 24) // (time * vocab))):
        scores = variant.scores(part)
        bad = ~torch.isfinite(scores).all(-1)
        if bad.any():
            raise NotFinite(
                f"id {int(part[bad][0])} gives scores that are NaN or infinite"
            )
    short = subject.lengths.fit(3)
    tokens = subject.draw(1, 2)
    lookups = Lookups(subject.caller.arranged(tokens))
    with functions_through(lookups) as seen:
        variant.scores(tokens)
    end = min(seen.rows, default=0)
    spare = end - vocab if vocab < end < vocab + SPARE else 0
    rest = f"; the token table has {spare} rows to spare" if spare else ""
    outside: tuple[int, ...] = vocab + spare, vocab + spare + 100, -1
    if current() is not None:  # where one rank refuses, the others would wait
        outside, rest = (), f"{rest}; no id outside, on several ranks"
    for id, position in product(outside, sorted({0, short - 1})):
        tokens = subject.draw(2, short, generator)
        tokens[1, position] = id
        if refusal(variant, tokens) is None:
            raise AssertionError(
                f"id {id} at position {position} is answered without an "
                f"error; the vocabulary has {vocab} ids"
            )
    note = _require_distinct(larger(subject) or own(subject))
    _require_told_apart(subject, ids)
    return f"{len(ids)} of {vocab} ids{rest}{note}"


def _require_distinct(variant: Variant) -> str:
    """Return which scores never move; raise where ids share such a score."""
    subject = variant.subject
    scores = variant.scores(subject.draw(3, 8)).flatten(0, 1)
    still = (scores == scores[0]).all(0)
    if len(scores) == 1 or not still.any():
        return ""
    excluded = still & (scores[0] < scores.amax() - EXCLUDED)
    excluded[[*subject.hidden]] = True
    ids = (still & ~excluded).nonzero().flatten().tolist()
    if len(ids) > 1 and not still.all():
        raise AssertionError(
            f"the scores of ids {', '.join(map(str, ids[:4]))} (of "
            f"{len(ids)}) are the same whatever the tokens: no training "
            f"tells these ids apart"
        )
    return "".join(f"; the score of id {i} never moves" for i in ids)


def _require_told_apart(subject: Subject, ids: Int[Tensor, "ids"]) -> None:
    """Raise where no score moves when one id takes another's place.

    With weights drawn again the two whose scores are nearest are tried.
    """
    variant, generator = own(subject), subject.generator()
    if subject.is_module and subject.builder.can_copy:
        model = doubled(subject, variant.model)
        redraw_zeros(model, generator, matrices=True)
    if subject.heavy:
        ids = torch.cat([ids[:ENDS_OF_IDS], ids[-ENDS_OF_IDS:]]).unique()
    texts = subject.draw(1, 2, generator).repeat(len(ids), 1)
    texts[:, -1] = ids
    shares = torch.randn(subject.vocab_size, generator=generator).double()
    sums = [
        variant.scores(part)[:, -1].cpu().double().nan_to_num(0, 0, 0) @ shares
        for part in texts.split(rows_at_once(len(shares), texts.size(1)))
    ]
    values, order = torch.cat(sums).sort()
    nearest = int(values.diff().argmin())
    one, other = sorted(ids[order[nearest : nearest + 2]].tolist())
    base = subject.draw(3, 8, generator)
    at = torch.randint(base.size(1), (3, 1), generator=generator)
    pair = [variant.scores(base.scatter(1, at, i)) for i in (one, other)]
    if not differ(*pair):
        raise AssertionError(
            f"ids {one} and {other} are one to the model: no score moves "
            f"where one takes the other's place"
        )


def _ids_to_try(
    subject: Subject, generator: torch.Generator
) -> Int[Tensor, "ids"]:
    """Return all ids, or of a large model ends, powers of two and some."""
    vocab = subject.vocab_size
    if subject.parameters * vocab <= ALL_IDS and vocab <= 1 << 14:
        return torch.arange(vocab)
    edges = [1 << k for k in range((vocab - 1).bit_length())]
    drawn = torch.randint(vocab, (512,), generator=generator)
    near = {e + d for e in edges for d in (-1, 0)} | {vocab - 1}
    return torch.tensor(sorted(near | set(drawn.tolist())))
