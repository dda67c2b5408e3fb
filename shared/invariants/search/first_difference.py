"""Which module of a model is the first to show a difference."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..model.reading import tensors_in

Parts = list[Tensor | None]
Seen = dict[tuple[str, int], tuple[Parts, Parts]]


def first_difference(
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
        model: the whole, which run calls.
        run: on ids.
        base: ids.
        changed: the same ids, but for those of one row from before on.
        row: the row.
        before: the split.
        noise: relative size that passes as rounding.

    Returns:
        Its dotted path and class, or None where no module shows it.
    """
    batch, time = base.shape

    def parts(value: Any) -> Parts:
        """Return what belongs to the row before the split."""
        return [
            _part(tensor, batch, time, row, before)
            for _, tensor in tensors_in(value)
        ]

    left = _record(model, lambda: run(base), parts)
    right = _record(model, lambda: run(changed), parts)
    fallback = None
    for key, (inputs, outputs) in left.items():
        if key not in right:
            continue
        other_inputs, other_outputs = right[key]
        if not _differ(outputs, other_outputs, noise):
            continue
        name = key[0]
        fallback = name if fallback is None else fallback
        if not _differ(inputs, other_inputs, noise):
            return _describe(model, name)
    return None if fallback is None else _describe(model, fallback)


def _describe(model: nn.Module, name: str) -> str:
    if not name:
        return f"{type(model).__name__}, the model itself"
    return f"{name} ({type(model.get_submodule(name)).__name__})"


def _record(
    model: nn.Module, run: Callable[[], object], parts: Callable[[Any], Parts]
) -> Seen:
    """Return each call's inputs and outputs, in the order they end."""
    names = {module: name for name, module in model.named_modules()}
    seen: Seen = {}
    counts: Counter[str] = Counter()
    open_calls: list[Parts] = []

    def enter(module: nn.Module, *given: Any) -> None:
        open_calls.append(parts(given))

    def leave(module: nn.Module, *given: Any) -> None:
        name = names[module]
        counts[name] += 1
        seen[name, counts[name]] = open_calls.pop(), parts(given[-1])

    with ExitStack() as hooks:
        for module in names:
            for register, hook in (
                (module.register_forward_pre_hook, enter),
                (module.register_forward_hook, leave),
            ):
                hooks.enter_context(register(hook, with_kwargs=True))
        run()
    return seen


def _part(
    x: Tensor, batch: int, time: int, row: int, before: int
) -> Tensor | None:
    """Return a copy of what is of one row before the split, time first."""
    if x.ndim < 2 or not x.is_floating_point():
        return None
    if x.shape[0] == batch and time in x.shape[1:]:
        x = x[row].movedim(x.shape[1:].index(time), 0)
    elif x.shape[0] == batch * time:
        x = x[row * time : (row + 1) * time]
    elif x.shape[:2] == (time, batch):
        x = x[:, row]
    else:
        return None
    return x[:before].detach().clone()


def _differ(left: Parts, right: Parts, noise: float) -> bool:
    """Whether any of two modules' tensors differ by more than rounding."""
    for a, b in zip(left, right, strict=False):
        if a is None or b is None or a.shape != b.shape:
            continue
        gap = torch.where(a == b, 0.0, (a - b).abs())
        size = a.abs().nan_to_num(posinf=0.0).max()
        if not bool((gap <= noise * size).all()):
            return True
    return False
