"""How the arguments of a call are given, and which ones never are.

Each form of an argument is tried in turn: the first one that the model
answers is given. A mask whose name does not say what it hides is given in
the form that changes no score where it hides nothing.
"""

from dataclasses import replace

from torch import Tensor

from ..cases import EVAL, OWN, Case
from ..documents import packings
from ..errors import ModelRaised, sentence
from ..model.inputs import (
    ANSWER,
    FLAGS,
    FOUR_AXES,
    INSTEAD,
    MASK,
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
    found, never = list[Input](), list[str]()
    closed = {*caller.given, *caller.never, *[MASK] * caller.takes_mask}
    for forms in filter(any, caller.forms):
        first = forms[0][0]
        four_axes, name = first.kind == FOUR_AXES, first.name
        if first.own > with_own or four_axes > caller.takes_mask:
            continue
        for alike in forms:
            answered, errors = _answered(variant, alike)
            if answered:
                break
        found += answered
        if four_axes or not errors:
            continue
        cause = errors[0].__cause__
        if isinstance(cause, REFUSALS) and name in sentence(cause):
            closed.add(name)
            words = type(cause).__name__
            subject = subject.noted(f"the model refuses {name} ({words})")
        elif not ANSWER.fullmatch(name):
            subject = subject.noted(f"not tried: {errors[0]}")
            if first.kind == FLAGS and answered:
                never += [e.words for e in alike if e not in answered]
    said, tokens = subject.documents, subject.draw(subject.fit_rows(2), 5)
    closed |= {name for each in found for name in each.make(tokens)}
    if callable(said) or (isinstance(said, str) and said not in closed):
        met = replace(subject, caller=replace(caller, inputs=tuple(found)))
        declared = packings(met)[0]
        answered, _ = _answered(variant, [declared])
        found += answered
        closed |= {*declared.make(tokens)} if answered else set()
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
        case = Case(given=each, own=each.own, visible=each.visible)
        try:
            scores = _scores(variant, replace(case, how=f"with {each.words}"))
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
