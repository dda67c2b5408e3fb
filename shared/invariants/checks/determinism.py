"""The same input gives the same output."""

from itertools import count, product

from torch import Tensor

from ...running.errors import FoundOut
from ...running.rounding import differ, gaps, require_finite
from ...running.tokens import others
from ...running.variant import Variant, own
from ...running.ways import AGAIN, ROWS, WITH_GRADIENTS, cases_of
from ..check import Subject, check


@check(weight=2)
def check_determinism(subject: Subject) -> str:
    """In eval mode the same input gives the same output after any other input.

    Why: if dropout stays on, or a cache outlives its sequence, each evaluation
    is that of a different model.
    How: one input is run again with other seeds, after inputs of other sizes,
    and with gradients. Calls with a mask, positions or documents follow calls
    with other masks, positions or documents. Finally, some batches that share
    one row or column are run twice, the second time in the opposite order and
    on a fresh model.
    If it fails: usual causes are dropout that ignores the training flag, state
    kept from call to call, and a mask kept for batches with equal first ids.
    If a model keeps state, all other checks restore its first state before
    each call, and a note says so. A model that draws random numbers in eval
    mode fails only this check: the others call it from a fixed random state.
    Reports: issue pytorch/pytorch 26338, F.dropout stays on in eval mode.
    """
    generator = subject.generator()
    variant = own(subject)
    tokens = subject.draw(2, 8, generator)
    first = variant.scores(tokens, seed=1, go_on=True)
    seeds = count(2)

    def compare(variant: Variant, after: str) -> None:
        scores = variant.scores(tokens, seed=next(seeds), go_on=True)
        _require_same(scores, first, after)

    for call in range(2, 10):
        compare(variant, f"at call {call}")
    compare(variant.run_as(WITH_GRADIENTS), WITH_GRADIENTS.how)
    for case in cases_of(AGAIN, subject):
        if case.own or case.targets:
            other = variant.run_as(case)
            scores = other.scores(tokens, seed=1, go_on=True)
            again = other.scores(tokens, seed=2, go_on=True)
            _require_same(again, scores, case.name)
            compare(variant, f"after a call {case.name}")
    for size in ((1, 1), (1, subject.block_size), (2, 8), (3, 5)):
        mixed = subject.draw(*size, generator)
        variant.scores(mixed, go_on=True)
        compare(variant, f"after an input of shape {tuple(mixed.shape)}")
    given = _require_nothing_kept(subject, tokens, first)
    longer, rows = subject.draw(2, 24, generator), slice(None)
    parts = (0,), (-1,), (rows, 0), (rows, -1)
    half = rows, slice(longer.size(1) // 2)
    batches = []
    for ids, part in (*product([tokens], parts), (longer, half)):
        unlike = others(ids, subject.vocab_size, generator)
        unlike[:, 1:-1:2] = 0  # id 0, which some models treat as padding
        mixed = unlike.clone()
        mixed[part] = ids[part]
        batches += [ids, mixed, unlike]
    answers = [variant.scores(ids, go_on=True) for ids in batches]
    other = own(subject)
    for ids, answer in reversed([*zip(batches, answers, strict=True)]):
        what = "after batches that agree with theirs in a row or a column"
        scores = other.scores(ids, go_on=True)
        _require_same(scores, answer, what)
    done = 19 + len(batches) + given
    return f"{done} calls, with other inputs between them"


def _require_nothing_kept(
    subject: Subject, tokens: Tensor, without: Tensor
) -> int:
    """Require that masks, positions and documents do not affect later calls.

    Args:
        subject: the model.
        tokens: two rows of ids.
        without: scores of the rows in a call without a mask, positions or
            documents.

    Returns:
        The number of calls that were compared.
    """
    calls = 0
    for case in cases_of(ROWS, subject):
        if case.crowd or (case.given is None and case.visible is None):
            continue
        first, then = case.at(0, 1), case.at(2, 3)
        kept, fresh = own(subject), own(subject).run_as(then)
        kept.run_as(first).scores(tokens, seed=1, go_on=True)
        scores = kept.run_as(then).scores(tokens, seed=1, go_on=True)
        alone = fresh.scores(tokens, seed=1, go_on=True)
        what = f"{case.how}, after a call with another"
        _require_same(scores, alone, what)
        plain = kept.scores(tokens, seed=1, go_on=True)
        _require_same(plain, without, f"after a call {case.how}")
        calls += 4
    return calls


def _require_same(scores: Tensor, first: Tensor, after: str) -> None:
    """Require that tokens get the same scores as in the first call."""
    if differ(scores, first):
        require_finite(first, infinite=True)
        moved = gaps(scores, first).amax(0)
        raise FoundOut(
            f"the same tokens give other scores {after}: position "
            f"{int(moved.argmax())} moves by {float(moved.max()):.2g} at "
            f"length {len(moved)}",
            keeps_state=True,
        )
