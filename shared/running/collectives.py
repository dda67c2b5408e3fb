"""Recognise operations that send tensors to other ranks."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .operations import tensors_in

NAMESPACES = ("c10d", "_c10d_functional")
COPY_IN = "fsdp.all_gather_copy_in"  # copies into this rank's part of a buffer
# collectives that write into no tensor of this rank
NOTHING_WRITTEN = ("send", "barrier", "monitored_barrier_", "check_for_nan")
RECEIVED = ("recv_", "recv_any_source_")


@cache
def is_collective(func: Any) -> bool:
    """Return whether an operation sends tensors to other ranks."""
    named = getattr(func, "namespace", "") in NAMESPACES
    return named or str(func).startswith(COPY_IN)


def finished(func: Any, args: tuple, result: Any) -> tuple[Any, list[Tensor]]:
    """Wait for a collective, unless it receives from another rank.

    Return its result, which needs no further wait, and the tensors it wrote.
    """
    space, _, name = func._schema.name.partition("::")
    if name in NOTHING_WRITTEN:
        return result, []
    written = tensors_in((result if space == NAMESPACES[1] else args[0],))
    if space == NAMESPACES[0] and name not in RECEIVED:
        work_of(result).wait()
        if isinstance(result, tuple):
            # the model gets a Work that is done, because a second wait would
            # copy gloo's tensors again, without the codes of a proof
            # (proof/codes)
            result = (*result[:-1], _done(written))
    return result, written


def _done(written: list[Tensor]) -> Any:
    """Return a finished Work object, in the form that a collective returns."""
    from torch._C import _distributed_c10d  # some builds of torch lack it

    made_by: Any = _distributed_c10d
    future = torch.futures.Future[list[Tensor]]()
    future.set_result(written)
    return made_by._create_work_from_future(future).boxed()


def work_of(answer: Any) -> Any:
    """Return the Work object in a collective's result."""
    last = answer[-1] if isinstance(answer, tuple) else answer
    return dist.Work.unbox(last)
