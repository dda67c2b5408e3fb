"""Where in a model a difference is first seen."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..model.reading import tensors_in

Seen = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]


def first_seen(
    model: nn.Module,
    run: Callable[[Int[Tensor, "batch time"]], object],
    base: Int[Tensor, "batch time"],
    changed: Int[Tensor, "batch time"],
    row: int,
    before: int,
    noise: float,
) -> str | None:
    """Return the innermost module that lets a difference in.

    The first one in the order of calls whose output before the split
    changes though its inputs there do not.

    Args:
        model: the whole.
        run: calls the model.
        base: ids.
        changed: the same ids, but for those of one row from the split on.
        row: the row.
        before: the split.
        noise: relative size that passes as rounding.

    Returns:
        Its dotted path and class, or None where no module shows it.
    """
    batch, time = base.shape
    left, right = _record(model, run, base), _record(model, run, changed)
    fallback = None
    for key, (inputs, outputs) in left.items():
        if key not in right:
            continue
        other_inputs, other_outputs = right[key]

        def differ(a: list[Tensor], b: list[Tensor]) -> bool:
            return any(
                _differ(x, y, batch, time, row, before, noise)
                for x, y in zip(a, b, strict=False)
            )

        if not differ(outputs, other_outputs):
            continue
        module = key[0]
        fallback = fallback or module
        if not differ(inputs, other_inputs):
            return _spoken(model, module)
    return None if fallback is None else _spoken(model, fallback)


def _spoken(model: nn.Module, name: str) -> str:
    if not name:
        return f"{type(model).__name__}, the model itself"
    return f"{name} ({type(model.get_submodule(name)).__name__})"


def _record(
    model: nn.Module,
    run: Callable[[Int[Tensor, "batch time"]], object],
    tokens: Int[Tensor, "batch time"],
) -> Seen:
    """Return each call's inputs and outputs, in the order they end."""
    seen: Seen = {}
    counts: dict[str, int] = {}
    open_calls: list[list[Tensor]] = []

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        open_calls.append(list(_kept((args, kwargs))))

    def leave(name: str) -> Callable[..., None]:
        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            answer: Any,
        ) -> None:
            counts[name] = counts.get(name, 0) + 1
            seen[name, counts[name]] = (open_calls.pop(), list(_kept(answer)))

        return hook

    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave(name), with_kwargs=True),
        ]
    try:
        run(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _kept(value: Any) -> Iterator[Tensor]:
    for _, tensor in tensors_in(value):
        yield tensor.detach().clone()


def _differ(
    a: Tensor,
    b: Tensor,
    batch: int,
    time: int,
    row: int,
    before: int,
    noise: float,
) -> bool:
    """Whether two tensors differ in one row before the split."""
    if a.shape != b.shape or a.ndim < 2 or not a.is_floating_point():
        return False
    if a.shape[0] == batch and time in a.shape[1:]:
        a, b = a[row], b[row]
        axis = a.shape.index(time)
    elif a.shape[0] == batch * time:
        a, b = (x.unflatten(0, (batch, time))[row] for x in (a, b))
        axis = 0
    elif a.shape[:2] == (time, batch):
        a, b = a[:, row], b[:, row]
        axis = 0
    else:
        return False
    a, b = a.narrow(axis, 0, before), b.narrow(axis, 0, before)
    gap = torch.where(a == b, 0.0, (a - b).abs())
    size = a.abs().nan_to_num(posinf=0.0).max()
    return not bool((gap <= noise * size).all())
