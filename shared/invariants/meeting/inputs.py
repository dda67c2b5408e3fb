"""How the arguments of a call are given, and which ones never are.

Each form of an argument is tried in turn: the first one that the model
answers is given. A mask whose name does not say what it hides is given in
the form that changes no score where it hides nothing.
"""

from dataclasses import replace

from torch import Tensor

from ..cases import EVAL, OWN, Case
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
    groups: dict[tuple[str, bool], list[Input]] = {}
    for each in caller.inputs:
        if with_own or not each.own:
            key = each.name, each.kind == FOUR_AXES
            groups.setdefault(key, []).append(each)
    found: list[Input] = []
    closed: set[str] = {*caller.given, *caller.never}
    never: list[str] = []
    for (name, four_axes), forms in groups.items():
        if four_axes and not caller.takes_mask:
            continue
        for form in range(1 + forms[-1].form):
            alike = [each for each in forms if each.form == form]
            answered, errors = _answered(subject, variant, alike)
            found += answered
            if answered or form == forms[-1].form:
                break
        cause = errors[0].__cause__ if errors else None
        if isinstance(cause, REFUSALS) and name in sentence(cause):
            closed.add(name)
            kind = type(cause).__name__
            subject = subject.noted(f"the model refuses {name} ({kind})")
            continue
        if errors and not four_axes and not ANSWER.fullmatch(name):
            subject = subject.noted(f"not tried: {errors[0]}")
            if answered and forms[0].kind == FLAGS and name not in closed:
                left = [e.words for e in alike if e not in answered]
                never += left
    given = {each.name for each in found}
    if any(CU_SEQLENS.fullmatch(name) for name in given):
        closed |= {n for n in caller.arguments if CU_SEQLENS.fullmatch(n)}
        closed |= {n for n in caller.arguments if MAX_SEQLEN.fullmatch(n)}
    if caller.takes_mask:
        closed.add(MASK)
    names = [*caller.arguments, *(caller.own_arguments if with_own else ())]
    never += [
        name
        for name in names
        if name not in given | closed and not passed_over(name)
    ]
    return replace(
        subject,
        caller=replace(caller, inputs=tuple(found)),
        never_given=tuple(never),
        instead=tuple(n for n in names if INSTEAD.fullmatch(n)),
    )


def _answered(
    subject: Subject, variant: Variant, alike: list[Input]
) -> tuple[list[Input], list[ModelRaised]]:
    """Return which inputs of a form the model answers, and exceptions."""
    answered: list[Input] = []
    errors: list[ModelRaised] = []
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
