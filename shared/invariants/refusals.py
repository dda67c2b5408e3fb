"""Make calls on the CPU that a model must refuse with an exception."""

import torch
from torch import Tensor

from ..running.errors import ModelRaised, SkipCheck
from ..running.program import ProgramFailed
from ..running.subject import Subject
from ..running.variant import Copy, Variant, build


def on_cpu(subject: Subject) -> Variant:
    """Return the model on the CPU, where a wrong index raises.

    On CUDA, a wrong index would end the process.
    """
    cpu, before = torch.device("cpu"), subject.device
    if not subject.is_module and before != cpu:
        raise SkipCheck(f"a function on {before} cannot be moved")
    model = build(subject, device=cpu)
    return Variant(subject, Copy(model, device=cpu))


def refusal(variant: Variant, tokens: Tensor) -> ModelRaised | None:
    """Return the exception that the model raises for ids, if it raises one."""
    try:
        variant.scores(tokens)
    except ModelRaised as error:
        # not a refusal of the ids: scores of another shape, or a broken
        # program
        if error.__cause__ is None or isinstance(
            error.__cause__, ProgramFailed
        ):
            raise
        return error
    return None
