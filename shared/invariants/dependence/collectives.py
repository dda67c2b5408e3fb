"""Codes go through collectives by the same collectives on the shadows.

Each rank holds the codes of its own numbers, so the ranks send each other
codes as they send numbers: int32, which gloo and NCCL both take. A reduction
takes the latest of all ranks, whatever it computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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


@dataclass
class Coming:
    """Codes that another rank sends; waited for when they are needed."""

    out: Tensor
    codes: Tensor
    work: Any


@cache
def is_collective(func: Any) -> bool:
    """Whether an operation sends numbers to other ranks."""
    named = getattr(func, "namespace", "") in NAMESPACES
    return named or str(func).startswith(COPY_IN)


def finish(func: Any, result: Any) -> bool:
    """Wait for what a collective writes in place; return whether it does.

    What is received may not be sent yet, and is not waited for.
    """
    space, _, name = func._schema.name.partition("::")
    never = (*NOTHING_WRITTEN, *RECEIVED)
    waits = space == NAMESPACES[0] and name not in never
    if waits:
        _work_of(result).wait()
    return waits


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
    given = []
    if not shadows.blind:
        given = _as_codes(shadows, (args, kwargs), reduces)
    result, written = finished(func, args, func(*args, **kwargs))
    if shadows.blind:
        for out in written:
            shadows.storages.meet(out)
        return result
    if not given:
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
            outs = tensors_in(_flat(answer))
        else:
            outs = tensors_in(_flat(changed[0]))
            work = _work_of(answer)
            if name in RECEIVED:
                for out, codes in zip(written, outs, strict=True):
                    coming = Coming(out, codes, work)
                    shadows.coming[out.untyped_storage()._cdata] = coming
                return result
            if name == "send":
                shadows.sent.append((outs, work))
                return result
            work.wait()
        found.append(outs)
    for index, out in enumerate(written):
        codes = found[0][index].to(CODES)
        if reduces:
            low = found[1][index] > 0
            codes = as_lowered(codes, low & (codes > FREE))
        shadows.storages.write(out, codes)
    return result


def finished(func: Any, args: tuple, result: Any) -> tuple[Any, list[Tensor]]:
    """Return a result that need not be waited for, and what is written."""
    space, _, name = func._schema.name.partition("::")
    if name in NOTHING_WRITTEN:
        return result, []
    functional = space == NAMESPACES[1]
    written = tensors_in(_flat(result if functional else args[0]))
    if finish(func, result) and isinstance(result, tuple):
        # each wait of gloo's copies anew what has no codes
        result = (*result[:-1], _done(written))
    return result, written


def settle(shadows: "Shadows", tensor: Tensor) -> None:
    """Wait for the codes of a tensor that another rank sends."""
    coming = shadows.coming.pop(tensor.untyped_storage()._cdata, None)
    if coming is not None:
        coming.work.wait()
        shadows.storages.write(coming.out, coming.codes.to(CODES))


def _as_codes(shadows: "Shadows", args: tuple, reduces: bool) -> list[Any]:
    """Return arguments with codes in place of tensors.

    Of a reduction first those that are as plain as can be, then where a
    number is as good as minus infinity, or may be.
    """

    def codes_of(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        codes = shadows.codes(tensor)
        codes = plain(codes) if reduces else codes
        return _laid_out(codes, tensor)

    def low_of(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        codes = shadows.codes(tensor)
        low = is_hidden(codes) | is_lowered(codes)
        if tensor.is_floating_point():
            low = low | where_known(codes, tensor.abs() >= -STRONG)
        return _laid_out(low, tensor)

    how: list[Callable[[Any], Any]] = [codes_of, low_of]
    return [tree_map(f, args) for f in how[: 1 + reduces]]


def _laid_out(codes: Tensor, tensor: Tensor) -> Tensor:
    """Return a code for each number of a tensor, with its strides."""
    return torch.empty_like(tensor, dtype=torch.int32).copy_(codes)


def _flat(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


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


class _Operator(Exception):
    """Carries a reduction's operator out of a call that is not made."""


class _Caught(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::allreduce_":
            raise _Operator(args[2])
        return func(*args, **(kwargs or {}))


@cache
def _max() -> Any:
    """Return the operator "max" as operations take it.

    Python cannot make one: it is read from a call, which is not made.
    """
    try:
        with _Caught():
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.MAX)
    except _Operator as caught:
        return caught.args[0]
    raise RuntimeError("this torch reduces by another operation")
