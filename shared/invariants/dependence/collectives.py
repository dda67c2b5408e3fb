"""Codes go through collectives by the same collectives on the shadows.

Each rank holds the codes of its own numbers, so the ranks send each other
codes as they send numbers: int32, which gloo and NCCL both take. A reduction
takes the latest of all ranks, whatever it computes.
"""

from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .call import tensors_in
from .codes import (
    CODES,
    FREE,
    STRONG,
    as_lowered,
    is_hidden,
    is_lowered,
    plain,
    where_known,
)

if TYPE_CHECKING:
    from .shadows import Shadows

NAMESPACES = ("c10d", "_c10d_functional")
COPY_IN = "fsdp.all_gather_copy_in"  # into this rank's part of the result
# they send, or bring nothing
NOTHING_WRITTEN = ("send", "barrier", "monitored_barrier_", "check_for_nan")
RECEIVED = ("recv_", "recv_any_source_")
OTHER_TAG = 1 << 16  # of messages with codes, between two ranks


@cache
def is_collective(func: Any) -> bool:
    """Whether an operation sends numbers to other ranks."""
    named = getattr(func, "namespace", "") in NAMESPACES
    return named or str(func).startswith(COPY_IN)


def finished(func: Any, args: tuple, result: Any) -> tuple[Any, list[Tensor]]:
    """Wait for a collective, but for what may not be sent yet.

    Returns a result that need not be waited for, and what is written.
    """
    space, _, name = func._schema.name.partition("::")
    if name in NOTHING_WRITTEN:
        return result, []
    written = tensors_in((result if space == NAMESPACES[1] else args[0],))
    if space == NAMESPACES[0] and name not in RECEIVED:
        _work_of(result).wait()
        if isinstance(result, tuple):
            # each wait of gloo's copies anew what has no codes
            result = (*result[:-1], _done(written))
    return result, written


def carry(shadows: "Shadows", func: Any, args: tuple, kwargs: dict) -> Any:
    """Call a collective, and give its results the codes of all ranks."""
    if func.namespace not in NAMESPACES:
        result = func(*args, **kwargs)
        if shadows.blind:
            shadows.storages.meet(result[1])
        else:
            most = max(int(plain(shadows.codes(t)).max()) for t in args[0])
            shadows.mark(result[1], most)
        return result
    name = func._schema.name.partition("::")[2]
    functional = func.namespace == NAMESPACES[1]
    names = [argument.name for argument in func._schema.arguments]
    if name.startswith("_wrap_tensor") or name == "wait_tensor":
        return func(*args, **kwargs)  # the same storage
    reduces = "reduce_op" in names
    given = () if shadows.blind else _as_codes(shadows, args, kwargs, reduces)
    result, written = finished(func, args, func(*args, **kwargs))
    if shadows.blind:
        for out in written:
            shadows.storages.meet(out)
        return result
    found = []
    for part, named in given:
        changed = list(part)
        if reduces:
            changed[names.index("reduce_op")] = "max" if functional else _max()
        if "tag" in names:
            changed[names.index("tag")] += OTHER_TAG
        answer = func(*changed, **named)
        if functional:
            answer = tree_map(torch.ops._c10d_functional.wait_tensor, answer)
            found.append(tensors_in((answer,)))
            continue
        found.append(tensors_in((changed[0],)))
        work = _work_of(answer)
        if name in RECEIVED:
            for one in zip(written, *found, strict=True):
                shadows.coming[one[0].untyped_storage()._cdata] = *one, work
            return result
        if name == "send":
            shadows.sent.append((found, work))
            return result
        work.wait()
    for out, codes, *low in zip(written, *found, strict=False):
        codes = codes.to(CODES)
        if reduces:
            codes = as_lowered(codes, (low[0] > 0) & (codes > FREE))
        shadows.storages.write(out, codes)
    return result


def settle(shadows: "Shadows", tensor: Tensor) -> None:
    """Wait for the codes of a tensor that another rank sends."""
    coming = shadows.coming.pop(tensor.untyped_storage()._cdata, None)
    if coming is not None:
        out, codes, work = coming
        work.wait()
        shadows.storages.write(out, codes.to(CODES))


def _as_codes(
    shadows: "Shadows", args: tuple, kwargs: dict, reduces: bool
) -> list[Any]:
    """Return arguments with codes in place of tensors, laid out as these.

    Of a reduction first those that are as plain as can be, then where a
    number is as good as minus infinity, or may be.
    """

    def codes_of(value: Any, low: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        codes = shadows.codes(value)
        if low:
            low_codes = is_hidden(codes) | is_lowered(codes)
            if value.is_floating_point():
                low_codes = low_codes | where_known(
                    codes, value.abs() >= -STRONG
                )
            codes = low_codes
        elif reduces:
            codes = plain(codes)
        return torch.empty_like(value, dtype=torch.int32).copy_(codes)

    return [
        tree_map(partial(codes_of, low=low), (args, kwargs))
        for low in (False, True)[: 1 + reduces]
    ]


def _done(written: list[Tensor]) -> Any:
    """Return a work that has ended, as an operation returns it."""
    from torch._C import _distributed_c10d  # not in every build

    made_by: Any = _distributed_c10d
    future = torch.futures.Future[list[Tensor]]()
    future.set_result(written)
    return made_by._create_work_from_future(future).boxed()


def _work_of(answer: Any) -> Any:
    last = answer[-1] if isinstance(answer, tuple) else answer
    return dist.Work.unbox(last)


class _Caught(TorchDispatchMode):
    """Keeps the operator of a reduction, which is not made."""

    operator: Any = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operator = args[2]
        raise NotImplementedError


@cache
def _max() -> Any:
    """Return the operator "max" as operations take it.

    Python cannot make one: it is read from a call.
    """
    number, caught = torch.zeros(1), _Caught()
    with suppress(NotImplementedError), caught:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return caught.operator
