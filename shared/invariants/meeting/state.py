"""State that a call leaves for the next one, and random numbers."""

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ModelRaised
from ..model.building import KeptState
from ..randomness import RecordedDraws, random_states
from ..subject import Subject
from ..variant import Variant

NEVER = -9e3  # a score below this everywhere leaves no probability


def find_state(
    subject: Subject, variant: Variant, batch: int, time: int
) -> Subject:
    """Find out whether a call changes the next one, and can be undone."""
    tokens, between = subject.draw(2 * batch, time).split(batch)

    def differs(variant: Variant) -> bool:
        try:
            variant.scores(between)
            scores = variant.scores(tokens, seed=subject.seed)
        except ModelRaised:
            return True
        return not torch.allclose(scores, first, 0, noise, True)

    stateful = replace(subject, keeps_state=True)
    undone = replace(variant, subject=stateful)
    undone.start_again()
    first = variant.scores(tokens, seed=subject.seed)
    largest = float(first.abs().nan_to_num_(posinf=0.0).max())
    noise = 64 * torch.finfo(first.dtype).eps * largest
    if not differs(variant):
        return subject
    if differs(undone):
        return replace(
            stateful,
            lost_state="what a call leaves for the next one cannot be undone: "
            "see check_determinism",
        )
    with RecordedDraws() as draws:
        undone.scores(tokens)
    # draws come from a generator that the model keeps
    return replace(
        stateful.noted(_words(variant, tokens)), noisy=bool(draws.shapes)
    )


def _words(variant: Variant, tokens: Tensor) -> str:
    """Return what a call leaves for the next one, with the name of it."""
    kept = KeptState(variant.model) if variant.subject.is_module else None
    with suppress(ModelRaised):
        variant.scores(tokens)
    name = f" ({kept.changed()})" if kept and kept.changed() else ""
    return (
        f"a call shows in the scores of the next one{name}, which is the "
        "matter of "
        "check_determinism: all other checks start each call from the state "
        "that the model was built in"
    )


def find_noise(subject: Subject, variant: Variant, batch: int) -> Subject:
    """Find ids without a score, and whether random numbers are drawn."""
    tokens = subject.draw(batch, 7)
    first, again = (variant.scores(tokens, seed=1) for _ in "ab")
    other = variant.scores(tokens, seed=2)
    hidden = (first < NEVER).flatten(0, 1).all(0)
    if hidden.any() and not hidden.all():
        ids = tuple(hidden.nonzero().flatten().tolist())
        subject = replace(subject, hidden=ids).noted(
            f"the scores of {len(ids)} ids are minus infinity, or as good as, "
            f"at every position ({ids[0]} is the first): they are left out"
        )
    if not first.equal(again) or first.equal(other):
        return subject
    before = random_states()
    with RecordedDraws() as draws:
        variant.scores(tokens)
    if not draws.shapes and random_states() == before:
        subject = replace(subject, keeps_state=True).noted(
            _words(variant, tokens)
        )
    else:
        subject = replace(subject, noisy=True).noted(
            "random numbers are drawn in eval mode, which is the matter of "
            "check_determinism: all other checks run the model from a fixed "
            "random state"
        )
    return subject
