"""Scores have the right shape at every size."""

from torch import Tensor

from ...running.context import during
from ...running.errors import FoundOut, ModelRaised, sentence
from ...running.model.calling import TIME_FIRST
from ...running.rounding import differ, floor, gaps
from ...running.tokens import draw
from ...running.variant import Variant, own
from ...running.ways import EVAL, TRAIN_WITHOUT_GRADIENTS
from ..check import Subject, check


@check()
def check_shape(subject: Subject) -> str:
    """(batch, time) ids give (batch, time, vocab) scores, at every size.

    Why: a squeezed batch of one, or scores of only the last position,
    broadcast into losses that look right.
    How: the model runs on one row, one token, and several sizes up to the
    longest, in eval and train mode. It also gets slices and transposes that
    are not contiguous. If time is the first axis of scores, a changed token
    must move only scores of its own row.
    If it fails: look for squeeze(), for scores of only the last position, for
    a batch or length that is rounded up. A slice (tokens[:, :-1]) must have
    the scores of its contiguous copy. Only this check reports lengths and
    numbers of rows that the model refuses. The other checks do not use them.
    Reports: without targets, karpathy/nanoGPT scores only the last position.
    """
    if subject.fault:
        raise AssertionError(subject.fault)
    if subject.refusals:
        text = "; ".join(
            f"{error}; {words}" for error, words in subject.refusals
        )
        raise ModelRaised(text) from subject.refusals[0][0].__cause__
    generator, longest = subject.generator(), subject.block_size
    variant = own(subject)
    sizes = {(1, 1), (4, 1), (1, 2), (3, 2), (5, 3), (2, 7), (1, longest)}
    sizes = {(b, subject.lengths.fit(t)) for b, t in sizes}
    for case in (EVAL, TRAIN_WITHOUT_GRADIENTS):
        for batch, time in sorted(sizes):
            if case.training and subject.takes_seconds(batch * time):
                # left to check_causality: the longest text in train mode
                continue
            tokens = subject.draw(batch, time, generator)
            scores = variant.run_as(case).scores(tokens, strict=True)
            if not scores.is_floating_point():
                raise AssertionError(f"scores have dtype {scores.dtype}")
    line_by_line = "a text in each line"
    inputs = line_by_line if subject.is_program else _require_inputs(variant)
    if (width := subject.reader.width) > subject.vocab_size:
        inputs += (
            f"; of {width} scores the first {subject.vocab_size} are read"
        )
    if subject.reader.form == TIME_FIRST:
        _require_time_first(variant)
        return f"(time, batch, vocab), which holds in that reading; {inputs}"
    return f"{len(sizes)} sizes, the longest of {longest}; {inputs}"


def _require_inputs(variant: Variant) -> str:
    """Require that slices get the scores of their copies; note int32 ids."""
    subject = variant.subject
    time = subject.lengths.fit(6)
    ids = draw(subject.vocab_size, 2, time + 1, subject.generator())
    ids = ids.to(subject.device)

    def other(a: Tensor, b: Tensor) -> bool:
        a, b = a.nan_to_num(), b.nan_to_num()
        return not subject.lost_state and differ(a, b)

    turned = ids[:, :-1].t().contiguous().t()
    slices = {
        "tokens[:, :-1]": ids[:, :-1],
        "the transpose of (time, batch) ids": turned,
        "tokens[:, 1:]": ids[:, 1:],
    }
    for name, sliced in slices.items():
        expected = variant.scores(sliced.contiguous(), seed=1)
        try:
            with during(f"on {name}, which are not contiguous"):
                scores = variant.scores(sliced, seed=1, as_given=True)
        except ModelRaised:
            if sliced.stride(-1) == 1:
                raise
            # a refusal is not a fault: few data loaders give transposed ids
            continue
        if other(scores, expected):
            again = variant.scores(sliced.contiguous(), seed=1)
            # the scores vary: check_determinism reports it
            if other(again, expected):
                return "the same ids have other scores each time"
            apart = float(gaps(scores, expected).max())
            raise AssertionError(
                f"{name}, which are not contiguous, are read as other ids: "
                f"their scores are {apart:.2g} from those of their copy"
            )
    try:
        scores = variant.scores(sliced.int(), seed=1)
    except ModelRaised as error:
        return f"int32 ids are refused ({sentence(error.__cause__ or error)})"
    if other(scores, expected):
        return "int32 ids have other scores than int64 ids"
    return "also int32 ids"


def _require_time_first(variant: Variant) -> None:
    """If scores are time-first, require that a token changes only its row."""
    subject = variant.subject
    tokens = subject.draw(subject.fit_rows(3), 5)
    base = variant.scores(tokens, seed=1)
    for at in (0, tokens.size(1) - 1):
        changed = tokens.clone()
        changed[0, at] = (changed[0, at] + 1) % subject.vocab_size
        moved = gaps(variant.scores(changed, seed=1), base) > floor(base)
        if moved[1:].any():
            row, position = moved.nonzero()[-1].tolist()
            text = (
                f"the scores have shape (time, batch, vocab), and read so "
                f"token {at} of row 0 moves position {position} of row {row}"
            )
            raise FoundOut(text, fault=text)
