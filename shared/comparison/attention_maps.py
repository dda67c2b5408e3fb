"""Attention probabilities of a model, watched from outside while it runs."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .models import stage_hooks
from .values.insides import attention


def attention_maps(
    model: Any, stages: Mapping[str, str], tokens: Int[Tensor, "batch time"]
) -> Float[Tensor, "layer head time time"] | None:
    """Run a model and keep the attention probabilities of its first row.

    Nothing is asked of the model: its calls of torch's softmax are watched
    while the stage "block.{i}.attention" runs. Where it calls the fused
    kernel, which shows no probabilities, they are computed from the query,
    the key and the mask that it was given, and kept only if they give the
    kernel's own answer. None where a layer shows none.
    """
    stage = "block.{i}.attention"
    if stage not in stages:
        return None
    watch = _SoftmaxWatch(tokens.size(1))
    with (
        stage_hooks(
            model,
            {stage: stages[stage]},
            before=watch.enter,
            after=lambda *_: watch.enter(None),
        ),  # fmt: skip
        torch.no_grad(),
        watch,
    ):
        model.log_probs(tokens[:1])
    names = [stage.format(i=i) for i in range(model.config.n_layer)]
    if any(name not in watch.found for name in names):
        return None
    maps = [torch.cat(watch.found[name], dim=1)[0] for name in names]
    same_shape = len({m.shape for m in maps}) == 1
    return torch.stack(maps) if same_shape else None


class _SoftmaxWatch(TorchFunctionMode):
    """Collects, for each stage of attention, its probabilities in order."""

    def __init__(self, time: int):
        super().__init__()
        self.found: dict[str, list[Tensor]] = {}
        self._time = time
        self._stage: str | None = None

    def enter(self, stage: str | None) -> None:
        self._stage = stage

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self._stage is None:
            return result
        name = getattr(func, "__name__", "")
        seen = None
        if name == "scaled_dot_product_attention":
            seen = _kernel_probabilities(result, *args, **(kwargs or {}))
        elif name == "softmax" and result.shape[-2:] == (self._time,) * 2:
            seen = result
        if seen is not None:
            by_head = seen.unsqueeze(1) if seen.dim() == 3 else seen
            self.found.setdefault(self._stage, []).append(by_head.detach())
        return result


def _kernel_probabilities(
    result: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    **options: Any,
) -> Tensor | None:
    """Compute what the kernel must have weighted the values with."""
    steps = dict(attention(query, key, value, *arguments, **options))
    if options.get("enable_gqa"):
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    found = steps["probabilities"]
    close = torch.allclose(found @ value, result, rtol=1e-3, atol=1e-4)
    return found if close else None
