"""The same input, the same output."""

from itertools import count, product

from torch import Tensor

from ...running.errors import FoundOut
from ...running.rounding import differ, gaps, require_finite
from ...running.tokens import others
from ...running.variant import Variant, own
from ...running.ways import AGAIN, WITH_GRADIENTS, cases_of
from ..check import Subject, check


@check()
def check_determinism(subject: Subject) -> str:
    """In eval mode the same input gives the same output, whatever came before.

    Why: dropout that never stops, and caches that outlive a sequence, make
    every evaluation another model's.
    How: one input again and again, with other seeds, after inputs of other
    sizes, with gradients; then batches that agree in one row or one column,
    which a fresh model gets in the opposite order.
    Reports: pytorch/pytorch 26338, F.dropout goes on in eval mode.
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
    longer, rows = subject.draw(2, 24, generator), slice(None)
    parts = (0,), (-1,), (rows, 0), (rows, -1)
    half = rows, slice(longer.size(1) // 2)
    batches = []
    for ids, part in (*product([tokens], parts), (longer, half)):
        unlike = others(ids, subject.vocab_size, generator)
        unlike[:, 1:-1:2] = 0  # which may count as padding
        mixed = unlike.clone()
        mixed[part] = ids[part]
        batches += [ids, mixed, unlike]
    answers = [variant.scores(ids, go_on=True) for ids in batches]
    other = own(subject)
    for ids, answer in reversed([*zip(batches, answers, strict=True)]):
        what = "after batches that agree with theirs in a row or a column"
        scores = other.scores(ids, go_on=True)
        _require_same(scores, answer, what)
    return f"{19 + len(batches)} calls, with other inputs between them"


def _require_same(scores: Tensor, first: Tensor, after: str) -> None:
    """Require that the same tokens have the same scores as at first."""
    if differ(scores, first):
        require_finite(first, infinite=True)
        moved = gaps(scores, first).amax(0)
        raise FoundOut(
            f"the same tokens give other scores {after}: position "
            f"{int(moved.argmax())} moves by {float(moved.max()):.2g} at "
            f"length {len(moved)}",
            keeps_state=True,
        )
