"""FlexAttention, run as it is written: one operation that modes see."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

from torch import Tensor

from .places import find_place
from .stances import FLEX


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
