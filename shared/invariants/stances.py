"""Which program runs: a model as it is written, or as its user compiled it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .places import find_place

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


@contextmanager
def flex_as_written() -> Iterator[None]:
    """Run an uncompiled flex_attention as one operation, which modes see.

    Otherwise dynamo would trace the mode. Each mask that is made inside
    notes the line that makes it, and whether torch chose its blocks.
    """
    flex: Any = sys.modules.get(FLEX)
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if not hasattr(flex, name):
        yield
        return
    before, make = getattr(flex, name), flex.BlockMask.__init__

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        _, by_torch = getattr(self.kv_num_blocks, "made", (None, False))
        while frame is not None and frame.f_globals.get("__name__") == FLEX:
            by_torch |= frame.f_code.co_name == "create_block_mask"
            frame = frame.f_back
        self.kv_num_blocks.made = find_place("BlockMask"), by_torch

    try:
        setattr(flex, name, True)
        flex.BlockMask.__init__ = made
        yield
    finally:
        setattr(flex, name, before)
        flex.BlockMask.__init__ = make


def lists_of(blocks: tuple[Any, ...]) -> list[Tensor]:
    """Return the lists of blocks that no line of torch's made."""
    _, by_torch = getattr(blocks[2], "made", (None, False))
    lists = [] if by_torch else blocks[2:6]
    return [part for part in lists if isinstance(part, Tensor)]
