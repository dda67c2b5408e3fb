"""Gradients as torch.autograd.grad returns them, whatever the graph."""

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
    """Return the gradients as torch.autograd.grad does.

    A checkpoint with use_reentrant=True refuses that call, and leaves
    gradients in .grad alone, as fully_shard does. On several ranks all of
    the graph runs: a part that leads to none of these sends what another
    rank waits for.
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
    """Return the torch.autograd.Functions of a graph, the last one first."""
    found = dict.fromkeys(
        getattr(node, "_forward_cls", None) for node in _nodes(value)
    )
    return [function for function in found if function is not None]


def place_of_backward(functions: Iterable[type]) -> Place | None:
    """Return the line of the first backward pass of some Functions."""
    backwards = (getattr(f, "backward", None) for f in functions)
    return next(map(place_of_def, filter(None, backwards)), None)


def _has_reentrant(value: Tensor) -> bool:
    return any(
        node.name() == "CheckpointFunctionBackward" for node in _nodes(value)
    )


def _nodes(value: Tensor) -> Iterator[Any]:
    """Yield the nodes of a graph, the last one first."""
    left, seen = deque([value.grad_fn]), set[Any]()
    while left:
        node = left.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [before for before, _ in node.next_functions]
