"""Settings of the caller, such as autocast, must not change a result."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from .ranks import joined

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()
_devices: list[torch.device] = []  # the callers' default devices


def one_run(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that runs models given to it.

    It runs as if called in a new program: gradients are recorded, without
    autocast or inference mode, on the CPU by default. One thread runs at a
    time, since seeds, hooks and the standard output belong to the process;
    where torch.distributed has several processes, all run it together.
    Afterwards each part of a given model is in the mode it was in.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # of pytest
        given = (*args, *kwargs.values())
        with _lock, joined(), _own_context(), modes_kept(given):
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                if len(_devices) > 1 or kwargs.get("debug"):
                    raise
                from .errors import with_their_frames

                # a user's mistake: none of the frames between are theirs
                cause = with_their_frames(error.__cause__)
                raise error.with_traceback(None) from cause

    return run


@contextmanager
def callers_device() -> Iterator[None]:
    """Give the model's own code the default device it is written for."""
    device = _devices[0] if _devices else torch.device("cpu")
    if device.type in ("cpu", "meta"):  # a tensor on meta has no numbers
        yield
    else:
        with device:
            yield


@contextmanager
def _own_context() -> Iterator[None]:
    default = torch.get_default_device()
    _devices.append(default)
    with ExitStack() as stack:
        stack.callback(_devices.pop)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # autocast keeps the weights that it cast until the outermost one ends:
        # a model's own shall end, so that changed weights are cast anew
        torch.clear_autocast_cache()
        for kind in {"cpu", default.type, _accelerator()}:
            if torch.amp.is_autocast_available(kind):
                before = torch.is_autocast_enabled(kind)
                stack.callback(torch.set_autocast_enabled, kind, before)
                torch.set_autocast_enabled(kind, False)
        if default.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


@contextmanager
def modes_kept(given: Iterable[object]) -> Iterator[None]:
    """Put each part back in train or eval mode."""
    models = [model for model in given if isinstance(model, nn.Module)]
    try:
        modes = [(p, p.training) for model in models for p in model.modules()]
    except TypeError:  # a part without a hash: such a model is refused
        modes = []
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
