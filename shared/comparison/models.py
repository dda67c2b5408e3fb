"""Compare two models: outputs stage by stage, costs, and time."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..agreement import largest_difference
from ..config import GPTConfig
from ..generation import eval_mode
from ..timing import Quartiles, interleave, quartiles, stopwatch
from .concepts import CONCEPTS

Stages = Mapping[str, str]


def stage_modules(model: Any, stages: Stages) -> dict[str, nn.Module]:
    """Return the submodule of each stage in the order of the data flow.

    `stages` maps each stage's name to the path of its submodule. In both, {i}
    means the layer; the returned names have the layer's number instead.

    Raises:
        ValueError: for a path that is not a submodule of the model.
    """
    in_block = [stage for stage in stages if "{i}" in stage]
    paths = {s: p for s, p in stages.items() if s == "embedding"}
    for i in range(model.config.n_layer):
        paths |= {s.format(i=i): stages[s].format(i=i) for s in in_block}
    paths |= {s: p for s, p in stages.items() if s not in in_block}
    try:
        return {s: model.get_submodule(path) for s, path in paths.items()}
    except AttributeError as error:
        name = type(model).__name__
        raise ValueError(f"no such stage of {name}: {error}") from None


def stage_outputs(
    model: Any, stages: Stages, tokens: Int[Tensor, "batch time"]
) -> dict[str, Float[Tensor, "batch time features"]]:
    """Run a model once in eval mode; return the output of each stage.

    The stages' names contain the layer's number; "log_probs" comes last.

    Raises:
        ValueError: for a stage that is not a submodule, or that never runs.
    """
    found: dict[str, Tensor] = {}

    def keep(stage: str, output: Any) -> None:
        found[stage] = output[0] if isinstance(output, tuple) else output

    modules = stage_modules(model, stages)
    with eval_mode(model), torch.no_grad(), ExitStack() as hooks:
        for stage, module in modules.items():
            hook = module.register_forward_hook(
                lambda *args, stage=stage: keep(stage, args[-1])
            )
            hooks.enter_context(hook)
        log_probs = model.log_probs(tokens)
    if missing := [stage for stage in modules if stage not in found]:
        raise ValueError(f"stages that were never run: {', '.join(missing)}")
    return {stage: found[stage] for stage in modules} | {
        "log_probs": log_probs
    }


def compare_models(
    left: Any,
    right: Any,
    stages: tuple[Stages, Stages],
    tokens: Int[Tensor, "batch time"],
) -> tuple[dict[str, float], tuple[Tensor, Tensor]]:
    """Run two models, and compare the outputs of the stages they share.

    Return the largest absolute difference at each stage, and the
    log-probabilities of both models.

    Raises:
        ValueError: if the configs differ; it names the field and both values.
    """
    for field in fields(GPTConfig):
        name = "inner_size" if field.name == "n_inner" else field.name
        a, b = getattr(left.config, name), getattr(right.config, name)
        if a != b:
            raise ValueError(f"{field.name} differs: {a!r} and {b!r}")
    ours = stage_outputs(left, stages[0], tokens)
    theirs = stage_outputs(right, stages[1], tokens)
    differences = {
        stage: largest_difference(ours[stage], theirs[stage])
        for stage in ours
        if stage in theirs
    }
    return differences, (ours["log_probs"], theirs["log_probs"])


def difference_by_concept(
    differences: Mapping[str, float],
) -> dict[str, float]:
    """Return the largest difference over all layers, for each concept."""
    found = {}
    for name, concept in CONCEPTS.items():
        if values := _in_all_layers(differences, concept.stage):
            # Python's max() misses a NaN unless it comes first
            found[name] = torch.tensor(values).double().max().item()
    return found


def count_parameters(model: Any, stages: Stages) -> dict[str, int]:
    """Count the parameters of each component; a tied matrix counts once.

    "block" counts all parameters of the blocks. "norms" counts the last norm
    and the parameters of the blocks outside attention and feed-forward. "head"
    counts the rest of the model. "buffers" counts the entries of all buffers,
    which are tensors that training does not change.
    """
    seen: set[Tensor] = set()
    modules = stage_modules(model, stages)
    stage = partial(_in_all_layers, modules)

    def count(modules: Iterable[nn.Module]) -> int:
        new = {p for m in modules for p in m.parameters()} - seen
        seen.update(new)
        return sum(p.numel() for p in new)

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    blocks = nn.ModuleList(stage("block.{i}"))
    return {
        "embedding": count(tables),
        "attention": count(stage("block.{i}.attention")),
        "feed_forward": count(stage("block.{i}.feed_forward")),
        "block": sum(p.numel() for p in blocks.parameters()),
        "norms": count([*blocks, *stage("final_norm")]),
        "head": count([model]),
        "total": sum(p.numel() for p in seen),
        "buffers": sum(b.numel() for b in model.buffers()),
    }


@torch.no_grad()
def count_flops(
    model: Any, stages: Stages, tokens: Int[Tensor, "batch time"]
) -> dict[str, int]:
    """Count floating-point operations by concept, in one real forward pass.

    Only matrix products count, summed over all layers. A multiplication and
    an addition are two operations. Attention counts as if all scores were
    computed, even the masked ones.
    """
    counter = FlopCounterMode(display=False)
    # the counter knows submodules' names only if a module is called
    run: Any = nn.Module()
    run.model, run.forward = model, model.log_probs
    # unfused, because on some devices the counter misses fused kernels
    with eval_mode(model), sdpa_kernel(SDPBackend.MATH), counter:
        run(tokens)
    by_name = counter.get_flop_counts()
    names = {module: name for name, module in run.named_modules()}
    counts = {
        stage: sum(by_name.get(f"Module.{names[module]}", {}).values())
        for stage, module in stage_modules(model, stages).items()
    }
    found = {
        name: sum(_in_all_layers(counts, concept.stage))
        for name, concept in CONCEPTS.items()
    }
    total = counter.get_total_flops()
    before = found["embedding"] + found["block"] + found["model"]
    return found | {"model": total, "head": total - before}


def _in_all_layers(by_stage: Mapping[str, Any], stage: str) -> list[Any]:
    """Return a stage's values in all layers; {i} in its name is the layer."""
    return [
        value
        for name, value in by_stage.items()
        if re.sub(r"\d+", "{i}", name) == stage
    ]


def forward_times(
    models: Sequence[Any], tokens: Int[Tensor, "batch time"]
) -> list[Quartiles]:
    """Time log_probs of each model in turn; return quartiles in seconds.

    Each round times each model once, so a slow moment of the machine affects
    all models. There are at most 20 rounds, and none starts after 3 seconds.
    """
    runs = {
        str(number): stopwatch(partial(model.log_probs, tokens), tokens.device)
        for number, model in enumerate(models)
    }
    with torch.inference_mode():
        seconds = interleave(runs, rounds=20, budget=3.0)
    return [quartiles(times) for times in seconds.values()]
