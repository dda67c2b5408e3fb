"""Compute gradients as torch.autograd.grad does, for any graph."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..running.places import Place, place_of_def
from ..running.ranks import current


def gradients_of(
    value: Tensor, tensors: Sequence[Tensor], **how: Any
) -> list[Any]:
    """Return gradients, as torch.autograd.grad does.

    It also works if gradients are stored only in .grad, as by fully_shard and
    by checkpoints with use_reentrant=True. On several ranks the whole graph
    runs, because any part of it may send values that another rank waits for.
    """
    if current() is None and not _has_reentrant(value):
        return [*torch.autograd.grad(value, tensors, **how)]
    for tensor in tensors:
        tensor.grad = None
    value.backward(retain_graph=how.get("retain_graph"))
    grads = []
    for tensor in tensors:
        if tensor.grad is None and how.get("materialize_grads"):
            tensor.grad = torch.zeros_like(tensor)
        grads.append(tensor.grad)
        tensor.grad = None
    return grads


def own_functions(value: Tensor) -> list[type]:
    """Return the torch.autograd.Functions of a graph, from last to first."""
    found = dict.fromkeys(
        getattr(node, "_forward_cls", None) for node in _nodes(value)
    )
    return [function for function in found if function is not None]


def place_of_backward(functions: Iterable[type]) -> Place | None:
    """Return the line of the first backward method of the Functions."""
    backwards = (getattr(f, "backward", None) for f in functions)
    return next(map(place_of_def, filter(None, backwards)), None)


def _has_reentrant(value: Tensor) -> bool:
    return any(
        node.name() == "CheckpointFunctionBackward" for node in _nodes(value)
    )


def _nodes(value: Tensor) -> Iterator[Any]:
    """Yield the nodes of a graph, from the last to the first."""
    left, seen = deque([value.grad_fn]), set[Any]()
    while left:
        node = left.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [before for before, _ in node.next_functions]
