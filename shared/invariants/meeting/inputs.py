"""How the arguments of a call are given, and which ones never are.

Each form of an argument is tried in turn: the first one that the model
answers is given. A mask whose name does not say what it hides is given in
the form that changes no score where it hides nothing.
"""

from dataclasses import replace

from torch import Tensor

from ..cases import EVAL, OWN, Case
from ..documents import packings, split
from ..errors import ModelRaised, sentence
from ..model.inputs import (
    ANSWER,
    CU_SEQLENS,
    FLAGS,
    FOUR_AXES,
    INSTEAD,
    MASK,
    MAX_SEQLEN,
    PADDING,
    Input,
    passed_over,
)
from ..subject import Subject
from ..variant import Variant

ALIKE = 1e-4  # of the scores' deviation, up to which a mask changes nothing
REFUSALS = ValueError, NotImplementedError


def find_inputs(subject: Subject, variant: Variant) -> Subject:
    """Find the form of each argument, and what is never given."""
    caller = subject.caller
    with_own = bool(caller.own_arguments) and _scores(variant, OWN) is not None
    names = [*caller.arguments, *(caller.own_arguments if with_own else ())]
    groups: dict[tuple[str, bool], dict[int, list[Input]]] = {}
    for each in caller.inputs:
        four_axes = each.kind == FOUR_AXES
        if each.own <= with_own and (caller.takes_mask or not four_axes):
            forms = groups.setdefault((each.name, four_axes), {})
            forms.setdefault(each.form, []).append(each)
    found, never = list[Input](), list[str]()
    closed: set[str] = {*caller.given, *caller.never}
    for (name, four_axes), forms in groups.items():
        for alike in forms.values():
            answered, errors = _answered(variant, alike)
            found += answered
            if answered:
                break
        cause = errors[0].__cause__ if errors else None
        if isinstance(cause, REFUSALS) and name in sentence(cause):
            closed.add(name)
            kind = type(cause).__name__
            subject = subject.noted(f"the model refuses {name} ({kind})")
        elif errors and not four_axes and not ANSWER.fullmatch(name):
            subject = subject.noted(f"not tried: {errors[0]}")
            if answered and alike[0].kind == FLAGS and name not in closed:
                never += [e.words for e in alike if e not in answered]
    closed |= {each.name for each in found}
    said = subject.documents
    if callable(said) or (isinstance(said, str) and said not in closed):
        met = replace(subject, caller=replace(caller, inputs=tuple(found)))
        given = [way.case(split).given for way in packings(met)[:1]]
        answered, _ = _answered(variant, [each for each in given if each])
        if answered:
            found += answered
            closed |= {said} if isinstance(said, str) else {*said([1])}
    if any(CU_SEQLENS.fullmatch(each.name) for each in found):
        together = CU_SEQLENS.fullmatch, MAX_SEQLEN.fullmatch
        closed |= {n for n in names if any(one(n) for one in together)}
    closed |= {MASK} if caller.takes_mask else set()
    never += [n for n in names if n not in closed and not passed_over(n)]
    return replace(
        subject,
        caller=replace(caller, inputs=tuple(found)),
        never_given=tuple(never),
        instead=tuple(n for n in names if INSTEAD.fullmatch(n)),
    )


def _answered(
    variant: Variant, alike: list[Input]
) -> tuple[list[Input], list[ModelRaised]]:
    """Return which inputs of a form the model answers, and exceptions."""
    answered, errors = list[Input](), list[ModelRaised]()
    for each in alike:
        case = Case(
            f"with {each.words}",
            given=each,
            own=each.own,
            visible=each.visible,
        )
        try:
            scores = _scores(variant, case)
        except ModelRaised as error:
            errors.append(error)
            continue
        if each.kind in (PADDING, FOUR_AXES) and not answered:
            plain = _scores(variant, OWN if each.own else EVAL)
            apart = (scores - plain).abs().max()  # NaN is no likeness
            if not bool(apart <= ALIKE * plain.std()):
                break
        answered.append(each)
    return answered, errors


def _scores(variant: Variant, case: Case) -> Tensor:
    subject = variant.subject
    time = subject.lengths.fit(5)
    tokens = subject.draw(subject.fit_rows(2 if time != 2 else 3), time)
    return variant.run_as(case).scores(tokens, seed=subject.seed)
