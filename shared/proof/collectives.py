"""Send dependency codes between ranks: collectives also run on codes.

Each rank holds the codes of its own numbers. Ranks send codes as they send
numbers. Codes are sent as int32, because gloo and NCCL both accept that dtype.
A reduction takes the largest code over all ranks.
"""

from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ..running.collectives import NAMESPACES, RECEIVED, finished, work_of
from ..running.operations import operations_through, tensors_in
from .codes import (
    CODES,
    FREE,
    STRONG,
    as_lowered,
    codes_of,
    is_hidden,
    is_lowered,
    plain,
    where_known,
)

if TYPE_CHECKING:
    from .shadows import Shadows

OTHER_TAG = 1 << 16  # added to the tag of each message that sends codes


def carry(shadows: "Shadows", func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a collective, and give its results the codes from all ranks."""
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
        return func(*args, **kwargs)  # these two operations change no numbers
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
        work = work_of(answer)
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
        shadows.storages.write(out, codes_of(codes))
    return result


def _as_codes(
    shadows: "Shadows", args: tuple, kwargs: dict, reduces: bool
) -> list[Any]:
    """Return arguments in which dependency codes replace each tensor.

    A reduction needs two such lists: one of plain codes, and one of the marks
    for hidden and lowered numbers.
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


@cache
def _max() -> Any:
    """Return the reduction "max" in the form that torch's operations accept.

    Python cannot create that form, so it is taken from a call's arguments.
    """
    number, caught = torch.zeros(1), list[Any]()

    def keep(func: Any, name: str, args: Any, kwargs: Any) -> Any:
        caught.append(args[2])
        raise NotImplementedError

    with suppress(NotImplementedError), operations_through(keep):
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return caught[0]
