"""Copies of the model: as built, changed, or in float64.

The rule of precision is here:

- scores are compared in float64 where the model can, so that a leak of 1e-9
  is seen;
- pairs of equal shapes round alike: a heavy model compares them in its own
  precision until two calls differ (`double_on_suspicion`);
- where time is short, long sequences go through a heavy model in its own
  precision.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .budget import Budget
from .errors import SkipCheck
from .model.building import Model, cast
from .rounding import dtype_name
from .subject import Subject
from .tokens import SHORT
from .variant import Copy, Variant
from .ways import EVAL, Way


def build(subject: Subject, budget: Budget, seed: int | None = None) -> Model:
    """Return the model anew; seed is that of its weights, if another."""
    budget.charge_copy()
    return subject.builder.build(seed)


def changeable(
    subject: Subject, budget: Budget, for_a_function: str, way: Way = EVAL
) -> Variant:
    """Return a module of one's own, to be changed, or skip the check."""
    budget.release()  # the copy may need the memory
    variant = Variant(subject, budget, Copy(build(subject, budget)), way)
    if not isinstance(variant.model, nn.Module):
        raise SkipCheck(for_a_function)
    if not subject.builder.can_copy:
        raise SkipCheck("the model cannot be copied")
    return variant


def own(subject: Subject, budget: Budget) -> Variant:
    """Return a new copy in the model's own precision."""
    return Variant(subject, budget, Copy(build(subject, budget)))


def fresh(subject: Subject, budget: Budget, masked: bool = False) -> Variant:
    """Return a new copy to compare pairs of equal shape in; see above."""
    model = build(subject, budget)
    if not subject.heavy:
        model = doubled(subject, budget, model, masked)
    return Variant(subject, budget, Copy(model, rough=subject.heavy))


def precise(
    subject: Subject, budget: Budget, time: int = 0, masked: bool = False
) -> Variant:
    """Return a copy in float64 where it can be, not to be changed.

    Time is the longest sequence that it gets, masked whether it gets masks.
    """
    spare = time > SHORT and subject.heavy and budget.limited
    double = not spare and in_double(subject, budget, masked)

    def make() -> Copy:
        copy = Copy(build(subject, budget))
        if double:
            doubled(subject, budget, copy.model, masked)
        return copy

    return Variant(subject, budget, budget.keep(("precise", double), make))


def doubled(
    subject: Subject, budget: Budget, model: Any, masked: bool = False
) -> Any:
    """Turn a model that was built into float64, where it can be."""
    if isinstance(model, nn.Module) and in_double(subject, budget, masked):
        return model.double()
    return model


def in_double(subject: Subject, budget: Budget, masked: bool = False) -> bool:
    """Whether a copy in float64 answers in it, and with numbers.

    The lowest float64 in a mask, say, is minus infinity to a softmax in
    float32.
    """
    known = subject.builder.in_double
    if masked in known:
        return known[masked]
    known[masked] = False
    tokens = torch.zeros(1, subject.lengths.fit(4), dtype=torch.long)
    hidden = int(masked and tokens.size(1) > 1)
    mask = (torch.arange(tokens.size(1)) >= hidden).long().unsqueeze(0)

    def answer(double: bool) -> Tensor:
        variant = changeable(subject, budget, "")
        if double:
            variant.model.double()
        scores = variant.scores(tokens, mask=mask if masked else None)
        return scores[:, hidden:]

    try:
        scores = answer(True)
    except Exception:  # check_dtype reports it; the others do without
        return False
    if scores.dtype != torch.float64:
        return False
    if scores.isfinite().all() or not answer(False).isfinite().all():
        known[masked] = True
        return True
    how = " with a left-padded attention mask" if masked else ""
    subject.builder.notes.append(
        f"in float64 the scores are NaN or infinite{how}, in the model's own "
        f"precision they are not: it is judged in that"
    )
    return False


def double_on_suspicion(variant: Variant) -> None:
    """Turn a copy that is still rough into float64."""
    variant.start_again()
    copy, masked = variant.copy, variant.way.visible is not None
    copy.rough, copy.kept, copy.built = False, None, None
    doubled(variant.subject, variant.budget, copy.model, masked)


def frozen(subject: Subject, budget: Budget) -> Variant:
    """Return a copy whose weights are not trained."""
    variant = fresh(subject, budget)
    for parameter in variant.model.parameters():
        parameter.requires_grad_(False)
    variant.copy.weights = "with frozen weights"
    return variant


def in_dtype(subject: Subject, budget: Budget, dtype: torch.dtype) -> Variant:
    """Return a copy in a dtype, in which it need not be able to run."""
    variant = changeable(subject, budget, "")
    cast(variant.model, dtype)
    variant.copy.weights = f"cast to {dtype_name(dtype)}"
    variant.copy.may_fail = True
    return variant
