"""Ids up to the ends of the vocabulary work, and others raise."""

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
from ..refusals import on_cpu, refusal

# most rows of a table beyond the vocabulary, which pad it to a multiple
SPARE = 128
ENDS_OF_IDS = 16  # how many first and last ids of a heavy model are tried
EXCLUDED = 100  # a score this far below the highest one leaves no probability
ALL_IDS = 1 << 36  # every id is tried if parameters times ids are fewer


@check(weight=1.5)
def check_vocabulary(subject: Subject) -> str:
    """Every id in [0, vocab) works, and an id outside raises.

    Why: an id that wraps around or is clamped is read as another token.
    How: all ids are tried, or some for a large model. Then -1, vocab and vocab
    + 100 are tried as first and last token, on the CPU. If the token table has
    spare rows, the latter two count from its end. The check also fails if the
    scores of two ids never move, because training cannot distinguish them.
    If it fails: use an nn.Embedding of exactly vocab_size rows. The report
    counts padding rows. If the scores of two ids never move, the head lacks
    them. If two ids can be exchanged in any text, they read the same row.
    Reports: in karpathy/nanoGPT, padding adds ids that no tokenizer has.
    """
    vocab = subject.vocab_size
    generator = subject.generator()
    variant = on_cpu(subject)
    ids = _ids_to_try(subject, generator)
    time = subject.lengths.fit(64)
    # all ids in rows; the first ids fill up the last row
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
    # not on several ranks: if one rank raises, the others would wait for it
    if current() is not None:
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
    """Return a note on an id whose score never moves; raise for several."""
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
            f"{len(ids)}) are the same for all tokens: no training can "
            f"distinguish these ids"
        )
    return "".join(f"; the score of id {i} never moves" for i in ids)


def _require_told_apart(subject: Subject, ids: Int[Tensor, "ids"]) -> None:
    """Raise if no score moves when one id replaces another.

    Only two ids are tried: those with the nearest scores after a short text.
    The matrices have redrawn weights if the model can be copied.
    """
    if subject.heavy:
        subject.kept.clear()  # the next copy needs the memory of these
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
            f"ids {one} and {other} are the same to the model: no score "
            f"changes when one replaces the other"
        )


def _ids_to_try(
    subject: Subject, generator: torch.Generator
) -> Int[Tensor, "ids"]:
    """Return all ids, or for a large model the ends and some others."""
    vocab = subject.vocab_size
    if subject.parameters * vocab <= ALL_IDS and vocab <= 1 << 14:
        return torch.arange(vocab)
    edges = [1 << k for k in range((vocab - 1).bit_length())]
    drawn = torch.randint(vocab, (512,), generator=generator)
    near = {e + d for e in edges for d in (-1, 0)} | {vocab - 1}
    return torch.tensor(sorted(near | set(drawn.tolist())))
