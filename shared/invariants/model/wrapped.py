"""Models in PyTorch's wrappers, and what a wrapper has made of a model."""

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..context import modes_kept
from ..errors import UnusableModel, sentence

WRAPPERS = (  # each has its model in .module
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    torch.optim.swa_utils.AveragedModel,
)


def unwrapped(model: Any) -> Any:
    """Return the module inside torch.compile, data parallelism, averages."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, WRAPPERS):
            model = model.module
        else:
            return model


def require_module(model: nn.Module) -> None:
    """Refuse a module without weights, lines or modes of its own."""
    name = type(model).__name__
    traced = torch.jit.TopLevelTracedModule
    try:
        parts = [*model.modules()]
    except TypeError as error:
        raise UnusableModel(
            f"PyTorch cannot list the parts of {name} ({sentence(error)}): a "
            f"class with __eq__ needs a __hash__, too"
        ) from None
    if any(isinstance(part, traced) for part in parts):
        raise UnusableModel(
            f"{name} is traced, and a trace keeps neither modes nor "
            f"gradients: give the model before torch.jit.trace"
        )
    for tensor, value in chain(
        model.named_parameters(), model.named_buffers()
    ):
        if is_lazy(value):
            raise UnusableModel(
                f"{tensor} of {name} has no shape yet: call the model "
                f"once before it is checked"
            )
    try:
        with modes_kept([model]):
            model.train(model.training)
    except NotImplementedError as error:  # as torch.export's modules do
        raise UnusableModel(
            f"{name} has no train and eval mode ({sentence(error)}): give "
            f"the model before torch.export"
        ) from None
