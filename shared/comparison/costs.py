"""What each concept computes: operations, and how far two styles differ."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .concepts import CONCEPTS
from .models import stage_hooks


def count_flops(
    model: Any, stages: Mapping[str, str], tokens: Int[Tensor, "batch time"]
) -> dict[str, int]:
    """Count floating-point operations by concept, in one real forward pass.

    Only products of matrices are counted, a multiplication and an addition
    as two, in all layers together; attention is counted as if every score
    were computed, also the masked ones.
    """
    counter = FlopCounterMode(display=False)
    started: dict[str, int] = {}
    ended: dict[str, int] = {}

    def note(stage: str, *_output: Any) -> None:
        into = ended if stage in started else started
        into[stage] = counter.get_total_flops()

    # the fused kernels are not counted on every device: this one is
    with (
        stage_hooks(model, stages, before=note, after=note),
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        counter,
    ):
        model.log_probs(tokens)

    def in_all_layers(stage: str) -> int:
        names = [stage.format(i=i) for i in range(model.config.n_layer)]
        return sum(ended[n] - started[n] for n in names if n in ended)

    total = counter.get_total_flops()
    return {
        "embedding": ended.get("embedding", 0),
        "attention": in_all_layers("block.{i}.attention"),
        "feed_forward": in_all_layers("block.{i}.feed_forward"),
        "block": in_all_layers("block.{i}"),
        "model": total,
        "head": total - ended.get("final_norm", total),
    }


def difference_by_concept(
    differences: Mapping[str, float],
) -> dict[str, float]:
    """Take the largest difference over all layers, for each concept."""
    by_stage: dict[str, list[float]] = {}
    for name, value in differences.items():
        by_stage.setdefault(re.sub(r"\d+", "{i}", name), []).append(value)
    # max() overlooks a NaN that does not come first
    return {
        name: torch.tensor(by_stage[concept.stage]).double().max().item()
        for name, concept in CONCEPTS.items()
        if concept.stage in by_stage
    }
