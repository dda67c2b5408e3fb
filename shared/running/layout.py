"""Find which axis of the tokens is time, the first or the second."""

import torch

from .errors import UnusableModel
from .model.calling import no_targets
from .subject import Subject
from .variant import Variant


def require_batch_first(variant: Variant, batch: int, time: int) -> Subject:
    """Refuse a model that takes (time, batch), unless layout="tb" was given.

    Such a model is recognised by two facts: a token changes later scores along
    the first axis only, and equal tokens have equal scores along the second.
    """
    subject = variant.subject
    if subject.caller.time_first or time < 2:
        return subject
    vocab = subject.vocab_size
    tokens = subject.draw(batch, time)
    change = no_targets(tokens)
    change[0, 0] = 1
    base, moved, equal = (
        variant.scores(ids, seed=subject.seed)
        for ids in (tokens, (tokens + change) % vocab, change * 0)
    )
    differs = (base != moved).any(-1)
    if (
        differs[1:, 0].any()
        and not differs[0, 1:].any()
        and torch.allclose(equal, equal[:, :1].expand_as(equal))
    ):
        raise UnusableModel(
            f"{subject.name} mixes the first axis of its tokens and not the "
            f'second: does it take (time, batch)? Then give layout="tb" '
            f"(in the shell --layout tb)"
        )
    return subject
