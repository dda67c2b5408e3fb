"""Which module of a model is the first to show a difference."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..model.building import hooked
from ..model.reading import tensors_in

Parts = list[Tensor]
Calls = dict[tuple[str, int], tuple[Parts, Parts]]


def first_difference(
    model: nn.Module,
    run: Callable[[Int[Tensor, "batch time"]], object],
    base: Int[Tensor, "batch time"],
    changed: Int[Tensor, "batch time"],
    row: int,
    before: int,
    noise: float,
) -> str | None:
    """Return the path and class of the module that lets a difference in.

    The first one in the order of calls whose output of a row before the
    split changes though its inputs there do not; None where none shows it.
    Changed ids are those of base, but for the row from the split on; noise is
    the relative size that passes as rounding.
    """
    batch, time = base.shape
    left, right = (
        _calls(model, partial(run, ids), (batch, time), row, before)
        for ids in (base, changed)
    )
    shown = [
        (name, not _differ(inputs, right[name, count][0], noise))
        for (name, count), (inputs, outputs) in left.items()
        if (name, count) in right
        and _differ(outputs, right[name, count][1], noise)
    ]
    if not shown:
        return None
    name = next((name for name, lets_in in shown if lets_in), shown[0][0])
    if not name:
        return f"{type(model).__name__}, the model itself"
    return f"{name} ({type(model.get_submodule(name)).__name__})"


def _calls(
    model: nn.Module,
    run: Callable[[], object],
    size: tuple[int, int],
    row: int,
    before: int,
) -> Calls:
    """Return what each call takes and puts out, in the order they end."""
    names = {module: name for name, module in model.named_modules()}
    calls: Calls = {}
    counts: Counter[str] = Counter()
    begun: list[Parts] = []

    def parts(value: Any) -> Parts:
        found = (_part(x, *size, row, before) for _, x in tensors_in(value))
        return [part for part in found if part is not None]

    def enter(module: nn.Module, *given: Any) -> None:
        begun.append(parts(given))

    def leave(module: nn.Module, *given: Any) -> None:
        name = names[module]
        counts[name] += 1
        calls[name, counts[name]] = begun.pop(), parts(given[-1])

    with hooked(names, leave, enter):
        run()
    return calls


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
    """Whether any of two calls' tensors differ by more than rounding."""
    return any(
        a.shape == b.shape
        and not torch.allclose(
            a, b, 0.0, noise * float(a.abs().nan_to_num(posinf=0.0).max())
        )
        for a, b in zip(left, right, strict=False)
    )
