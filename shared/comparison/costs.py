"""What each concept costs: parameters, and work in one forward pass."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .models import count_parameters, stage_paths, submodule


def count_flops(
    model: Any, stages: Mapping[str, str], tokens: Int[Tensor, "batch time"]
) -> dict[str, int]:
    """Count floating-point operations by concept, in one real forward pass.

    Only products of matrices are counted, a multiplication and an addition
    as two; attention is counted as if every score were computed, also the
    masked ones.

    Args:
        model: a language model with `config` and `log_probs`.
        stages: its stages.
        tokens: ids.

    Returns:
        For each concept its operations in all layers together.
    """
    counts = dict.fromkeys(("embedding", "attention", "feed_forward"), 0)
    counts |= dict.fromkeys(("block", "model", "head"), 0)
    counter = FlopCounterMode(display=False)
    started: dict[str, int] = {}
    hooks = []

    def begin(stage: str) -> Any:
        def hook(_module, _inputs):
            started[stage] = counter.get_total_flops()

        return hook

    def end(stage: str) -> Any:
        def hook(_module, _inputs, _output):
            total = counter.get_total_flops()
            concept = stage.split(".")[-1]
            if stage == "embedding":
                counts["embedding"] = total
            elif stage == "final_norm":
                counts["head"] = -total
            elif concept in counts:
                counts[concept] += total - started[stage]
            else:
                counts["block"] += total - started[stage]

        return hook

    was_training = model.training
    model.eval()
    try:
        paths = stage_paths(stages, model.config.n_layer)
        for stage, path in paths.items():
            module = submodule(model, path)
            hooks.append(module.register_forward_pre_hook(begin(stage)))
            hooks.append(module.register_forward_hook(end(stage)))
        # the fused kernels are not counted on every device: this one is
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            model.log_probs(tokens)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    counts["model"] = counter.get_total_flops()
    counts["head"] += counts["model"] if counts["head"] else 0
    return counts


def parameters_by_concept(
    model: Any, stages: Mapping[str, str]
) -> dict[str, int]:
    """Count parameters by concept, in all layers together.

    A block counts what is in it, the model everything; a head that is tied
    to the embedding has none of its own.
    """
    counts = count_parameters(model, stages)
    paths = stage_paths(stages, model.config.n_layer)
    blocks = {
        p
        for stage, path in paths.items()
        if stage.startswith("block.") and stage.count(".") == 1
        for p in submodule(model, path).parameters()
    }
    return {
        "embedding": counts["embedding"],
        "attention": counts["attention"],
        "feed_forward": counts["feed_forward"],
        "block": sum(p.numel() for p in blocks),
        "model": counts["total"],
        "head": counts["head"],
    }


def difference_by_concept(
    differences: Mapping[str, float], stages: Mapping[str, str]
) -> dict[str, float]:
    """Take the largest difference over all layers, for each concept.

    Args:
        differences: largest absolute difference at each stage.
        stages: the stage of each concept; {i} is the layer.
    """
    found = {}
    for concept, stage in stages.items():
        pattern = re.escape(stage).replace(r"\{i\}", r"\d+")
        values = [
            value
            for name, value in differences.items()
            if re.fullmatch(pattern, name)
        ]
        if values:
            # max() overlooks a NaN that does not come first
            found[concept] = torch.tensor(values).double().max().item()
    return found
