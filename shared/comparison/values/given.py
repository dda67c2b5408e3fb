"""Read the models and tokens that the user gives."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...running.context import isolated
from ...running.errors import ModelRaised, UnknownSize, UnusableModel
from ...running.layout import require_batch_first
from ...running.meeting import meet
from ...running.model.building import Builder, is_factory
from ...running.subject import Subject
from ...running.variant import own

SEED = 0  # seed of drawn tokens, and of weights that a factory draws
DRAWN = 16  # number of tokens to draw if the user gives none

Model = Callable[..., Any]


def size_of(given: Int[Tensor, "batch time"] | None) -> tuple[int, int]:
    """Return the rows and length of the given tokens, or of drawn ones."""
    return (1, DRAWN) if given is None else (given.size(0), given.size(1))


def fitting(
    given: Int[Tensor, "batch time"] | None,
    longest: int,
    vocab_size: int,
    rows: int = 1,
) -> Int[Tensor, "batch time"]:
    """Return the given tokens, or draw some; the models must accept them."""
    if given is None:
        generator = torch.Generator().manual_seed(SEED)
        size = rows, longest
        return torch.randint(vocab_size, size, generator=generator)
    if given.size(1) > longest:
        raise ValueError(
            f"{given.size(1)} tokens are more than the {longest} allowed"
        )
    outside = given[(given < 0) | (given >= vocab_size)]
    if outside.numel():
        raise ValueError(
            f"token {outside[0]} is not in the vocabulary of {vocab_size:,}"
        )
    return given


def tokens_of_both(
    subjects: Sequence[Subject],
    names: Sequence[str],
    given: Int[Tensor, "batch time"] | None,
) -> Int[Tensor, "batch time"]:
    """Return the tokens to run two models on: the given ones, or drawn ones.

    Raises:
        ValueError: if the vocabularies differ, or if tokens do not fit.
    """
    sizes = [subject.vocab_size for subject in subjects]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{names[0]} has {sizes[0]:,} tokens, {names[1]} has "
            f"{sizes[1]:,}: they cannot be one function"
        )
    longest = min(subject.block_size for subject in subjects)
    return fitting(given, longest, sizes[0])


def as_tokens(
    tokens: Int[Tensor, "batch time"] | Sequence[int], name: str = "tokens"
) -> Int[Tensor, "batch time"]:
    """Return ids as rows, or raise ValueError."""
    given = torch.as_tensor(tokens)
    whole = not given.is_floating_point() and given.dtype != torch.bool
    if given.dim() not in (1, 2) or not given.numel() or not whole:
        raise ValueError(
            f"{name} must be ids, (batch, time) or one row of them, got "
            f"{given.dtype} of shape {tuple(given.shape)}"
        )
    return given.long().reshape(-1, given.size(-1))


def require_rows_first(subject: Subject) -> None:
    """Raise ValueError for a torch model whose input is (time, batch)."""
    with isolated(SEED), suppress(ModelRaised):
        require_batch_first(own(subject), 2, 6)


def subject_of(
    model: Model,
    size: tuple[int, int],
    vocab_size: int | None,
    **settings: Any,
) -> Subject:
    """Return a model as a subject, which knows how to call the model.

    `size` has the rows and tokens of the call that tries the model. The
    settings are those of `meet`; at=None finds all facts that `meet` can find.
    """
    try:
        if is_factory(model):  # build once, because a loader may be slow
            model = Builder(model, SEED, None).build()
        subject = meet(
            model,
            vocab_size=vocab_size,
            block_size=size[1],
            **({"at": size} | settings),
        )
        subject.require_scores()
        return subject
    except UnknownSize:
        raise
    except UnusableModel as error:
        raise ValueError(str(error)) from error.__cause__
