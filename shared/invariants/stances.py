"""Which program runs: a model as it is written, or as its user compiled it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

DYNAMO = "torch._dynamo"  # nothing is compiled where it is not imported
FLEX = "torch.nn.attention.flex_attention"  # it compiles its own operator


@contextmanager
def as_written() -> Iterator[None]:
    """Run what is compiled as it is written: modes and hooks see it."""
    if DYNAMO in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def as_compiled() -> Iterator[None]:
    """Run what is compiled so, in a program that compiles nothing else anew.

    No mode may see it: dynamo would leave such a frame to Python for ever.

    Raises:
        RuntimeError: for a frame that would be compiled once more than
            dynamo's limit, and run as it is written.
    """
    import torch._dynamo.config as config

    limit = {"fail_on_recompile_limit_hit": True}
    with (
        _disable_current_modes(),
        torch.compiler.set_stance("default"),
        config.patch(limit),
    ):
        yield


def compiled_frames() -> int:
    """Return how many frames dynamo has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["frames"]["ok"]


def runs_compiled(call: Callable[[], Any]) -> bool:
    """Whether a call reaches what torch.compile made, whatever its stance."""
    if DYNAMO not in sys.modules:
        return False
    found = False

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        if event == "call" and frame.f_code.co_name == "compile_wrapper":
            caller = frame.f_back
            names = caller.f_globals if caller is not None else {}
            found |= names.get("__name__") != FLEX

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found
