"""The ends of lengths and vocabularies."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import ModelRaised, SkipCheck, sentence
from ..model.building import Model
from ..model.sizes import before_first_position, has_position_table
from ..model.subject import Subject
from ..model.tokens import draw
from ..search.larger_weights import amplified
from .embedding import Lookups

SPARE = 128  # rows of a table beyond the vocabulary: padding to a multiple
EXCLUDED = 100  # a score so far below the highest leaves no probability
ALL_IDS = 1 << 36  # parameters times ids: up to here every id is tried


@contextmanager
def _on_cpu(subject: Subject) -> Iterator[Model]:
    """Yield the model on the CPU, where a wrong index is an exception.

    On CUDA it would end the process.
    """
    cpu = torch.device("cpu")
    builder, before = subject.builder, subject.device
    if not subject.is_module and before != cpu:
        raise SkipCheck(f"a function on {before} cannot be moved")
    builder.device = cpu
    try:
        yield subject.build()
    finally:
        builder.device = before


def check_length_limit(subject: Subject) -> str:
    """A model whose positions end refuses one token more.

    Why: positions that wrap around, or a mask that no longer reaches, give
    an answer that looks like any other.
    How: the declared limit must work, and one token and seven more must
    raise; where no table of positions and no contract (log_probs) ends, what
    is answered is told. On the CPU.
    Cost: three forwards of that length.
    Reports: "GPT from Scratch" under python -O: a length beyond the mask is
    accepted, and not causal.
    """
    if subject.limit is None:
        raise SkipCheck("no limit declared")
    limit = subject.limit.value
    if limit > max(subject.block_size, 4096):
        raise SkipCheck(f"{subject.limit} is too long to try")
    offset = ""
    with _on_cpu(subject) as model:
        fewer = before_first_position(model, limit)
        if fewer and subject.block_size == limit - fewer:
            offset = f"declared are {limit}, taken {limit - fewer}: positions "
            offset += "start behind the padding id; "
            limit -= fewer

        tokens = draw(subject.vocab_size, 1, limit + 7, subject.generator())
        if error := _refusal(subject, model, tokens[:, :limit]):
            raise AssertionError(
                f"the model declares {subject.limit}, but {error}"
            ) from error.__cause__
        for time in (limit + 1, limit + 7):
            if error := _refusal(subject, model, tokens[:, :time]):
                reason = sentence(error.__cause__ or error)
                continue
            words = (
                f"the model declares {subject.limit} and answers {time} "
                f"tokens without an error"
            )
            if subject.caller.method is not None or has_position_table(
                model, subject.limit.value, subject.vocab_size
            ):
                raise AssertionError(words)
            return f"{words}: it has no table of as many positions"
    return f"{offset}{limit + 1} tokens: {reason[:80]}"


def _refusal(
    subject: Subject, model: Model, tokens: Tensor
) -> ModelRaised | None:
    """Return what the model raises on ids, None where it answers."""
    try:
        subject.scores(model, tokens)
    except ModelRaised as error:
        if error.__cause__ is None:  # scores of another shape
            raise
        return error
    return None


def check_vocabulary(subject: Subject) -> str:
    """Every id in [0, vocab) works, and an id outside raises.

    Why: an id that wraps around or is clamped is another token's text.
    How: all ids, or of a large model some; then vocab, vocab + 100 and -1 in
    the first and last place; with spare rows in the table those behind them.
    On the CPU. Of two scores that never move, but for excluded ones, no
    training can tell the ids apart.
    Cost: vocab tokens, of a large model some 600.
    Reports: karpathy/nanoGPT pads its vocabulary to 50304, and samples ids
    that no tokenizer knows.
    """
    vocab = subject.vocab_size
    generator = subject.generator()
    with _on_cpu(subject) as model:
        ids = _ids_to_try(subject, generator)
        time = subject.lengths.fit(64)
        # the last row is filled up with the first ids
        rows = ids.repeat(time)[: time * -(-len(ids) // time)].view(-1, time)
        for part in rows.split(max(1, (1 << 24) // (time * vocab))):
            scores = subject.scores(model, part)
            bad = ~torch.isfinite(scores).all(-1)
            if bad.any():
                raise AssertionError(
                    f"id {int(part[bad][0])} gives scores that are NaN or "
                    f"infinite"
                )
        short = subject.lengths.fit(3)
        tokens = subject.draw(1, 2)
        with Lookups(subject.caller.arranged(tokens)) as seen:
            subject.scores(model, tokens)
        end = min(seen.rows, default=0)
        spare = end - vocab if vocab < end < vocab + SPARE else 0
        for outside in (vocab + spare, vocab + spare + 100, -1):
            for position in sorted({0, short - 1}):
                tokens = subject.draw(2, short, generator)
                tokens[1, position] = outside
                if _refusal(subject, model, tokens) is None:
                    raise AssertionError(
                        f"id {outside} at position {position} is answered "
                        f"without an error; the vocabulary has {vocab} ids"
                    )
    rest = f"; the token table has {spare} rows to spare" if spare else ""
    return f"{len(ids)} of {vocab} ids{rest}{_require_told_apart(subject)}"


def _require_told_apart(subject: Subject) -> str:
    """Return which scores never move; raise where ids share such a score."""
    model = amplified(subject) or subject.build()
    scores = subject.scores(model, subject.draw(3, 8)).flatten(0, 1)
    still = (scores == scores[0]).all(0)
    if len(scores) == 1 or not still.any():
        return ""
    excluded = still & (scores[0] < scores.amax() - EXCLUDED)
    excluded[subject.hidden] = True
    ids = (still & ~excluded).nonzero().flatten().tolist()
    if len(ids) > 1 and not still.all():
        raise AssertionError(
            f"the scores of ids {', '.join(map(str, ids[:4]))} (of "
            f"{len(ids)}) are the same whatever the tokens: no training "
            f"tells these ids apart"
        )
    return "".join(f"; the score of id {i} never moves" for i in ids)


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
