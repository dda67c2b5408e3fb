"""Calls that a model must refuse: on the CPU, with its exception."""

import torch
from torch import Tensor

from ..running.errors import ModelRaised, SkipCheck
from ..running.program import ProgramFailed
from ..running.subject import Subject
from ..running.variant import Copy, Variant


def on_cpu(subject: Subject) -> Variant:
    """Return the model on the CPU, where a wrong index is an exception.

    On CUDA it would end the process.
    """
    cpu, before = torch.device("cpu"), subject.device
    if not subject.is_module and before != cpu:
        raise SkipCheck(f"a function on {before} cannot be moved")
    model = subject.builder.build(device=cpu)
    return Variant(subject, Copy(model, device=cpu))


def refusal(variant: Variant, tokens: Tensor) -> ModelRaised | None:
    """Return what the model raises on ids, None where it answers."""
    try:
        variant.scores(tokens)
    except ModelRaised as error:
        # scores of another shape, or a program that broke
        if error.__cause__ is None or isinstance(
            error.__cause__, ProgramFailed
        ):
            raise
        return error
    return None
