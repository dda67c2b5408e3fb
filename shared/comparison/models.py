"""Two models beside each other: outputs stage by stage, parameters, time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config import GPTConfig
from ..generation import eval_mode
from .timing import Quartiles, interleave, quartiles, stopwatch


def stage_outputs(
    model: Any, stages: Mapping[str, str], tokens: Int[Tensor, "batch time"]
) -> dict[str, Float[Tensor, "batch time features"]]:
    """Run a model once in eval mode and keep what each stage gave.

    Args:
        model: a language model with `config` and `log_probs`.
        stages: for each stage the submodule whose output it is, {i}
            standing for the layer.
        tokens: ids.

    Returns:
        Outputs by stage, layers spelt out, "log_probs" last.

    Raises:
        ValueError: for a path that is no submodule of the model.
    """
    found: dict[str, Tensor] = {}

    def keep(stage: str, output: Any) -> None:
        found[stage] = output[0] if isinstance(output, tuple) else output

    with stage_hooks(model, stages, after=keep), torch.inference_mode():
        log_probs = model.log_probs(tokens)
    names = stage_paths(stages, model.config.n_layer)
    if missing := [stage for stage in names if stage not in found]:
        raise ValueError(f"stages that were never run: {', '.join(missing)}")
    return {stage: found[stage] for stage in names} | {"log_probs": log_probs}


@contextmanager
def stage_hooks(
    model: Any,
    stages: Mapping[str, str],
    *,
    before: Callable[[str], None] = lambda stage: None,
    after: Callable[[str, Any], None] = lambda stage, output: None,
) -> Iterator[None]:
    """Put a model in eval mode, and call functions around its stages.

    Both get the stage's name, the layer spelt out, `after` its output too.
    """
    hooks = []
    with eval_mode(model):
        try:
            paths = stage_paths(stages, model.config.n_layer)
            for stage, path in paths.items():
                module = submodule(model, path)
                hooks += [
                    module.register_forward_pre_hook(
                        lambda *_, stage=stage: before(stage)
                    ),
                    module.register_forward_hook(
                        lambda *args, stage=stage: after(stage, args[-1])
                    ),
                ]
            yield
        finally:
            for hook in hooks:
                hook.remove()


def stage_paths(stages: Mapping[str, str], n_layer: int) -> dict[str, str]:
    """Spell out {i} for every layer, in the order of the data flow."""
    before = {s: p for s, p in stages.items() if s == "embedding"}
    block = {s: p for s, p in stages.items() if "{i}" in s}
    after = {s: p for s, p in stages.items() if s not in before | block}
    layers = {
        stage.format(i=i): path.format(i=i)
        for i in range(n_layer)
        for stage, path in block.items()
    }
    return before | layers | after


def stage_modules(
    model: Any, stages: Mapping[str, str], stage: str
) -> list[nn.Module]:
    """Return the submodule of a stage in every layer, or none."""
    if stage not in stages:
        return []
    paths = stage_paths({stage: stages[stage]}, model.config.n_layer)
    return [submodule(model, path) for path in paths.values()]


def submodule(model: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a dotted path; ValueError for none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        name = type(model).__name__
        raise ValueError(f"{name} has no submodule {path!r}") from None


def compare_models(
    left: Any,
    right: Any,
    stages: tuple[Mapping[str, str], Mapping[str, str]],
    tokens: Int[Tensor, "batch time"],
) -> dict[str, float]:
    """Return the largest absolute difference at each common stage.

    Raises:
        ValueError: where the configs differ, naming field and values.
    """
    for field in fields(GPTConfig):
        name = "inner_size" if field.name == "n_inner" else field.name
        a, b = getattr(left.config, name), getattr(right.config, name)
        if a != b:
            raise ValueError(f"{field.name} differs: {a!r} and {b!r}")
    ours = stage_outputs(left, stages[0], tokens)
    theirs = stage_outputs(right, stages[1], tokens)
    return {
        stage: largest_difference(ours[stage], theirs[stage])
        for stage in ours
        if stage in theirs
    }


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return max |a - b|, computed in float64; NaN where either is NaN."""
    left, right = (x.detach().cpu().double() for x in (a, b))
    return (left - right).abs().max().item()


def count_parameters(model: Any, stages: Mapping[str, str]) -> dict[str, int]:
    """Count the parameters of each component, a tied matrix once.

    "block" counts all that is in the blocks, "norms" what remains of them
    beside attention and feed-forward, and the last norm; "head" is what
    remains of the model; "buffers" counts numbers that are kept with the
    model but not trained.
    """
    seen: set[Tensor] = set()

    def count(modules: Sequence[nn.Module]) -> int:
        new = {p for m in modules for p in m.parameters()} - seen
        seen.update(new)
        return sum(p.numel() for p in new)

    def stage(name: str) -> list[nn.Module]:
        return stage_modules(model, stages, name)

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return {
        "embedding": count(tables),
        "attention": count(stage("block.{i}.attention")),
        "feed_forward": count(stage("block.{i}.feed_forward")),
        "block": sum(
            p.numel() for p in nn.ModuleList(stage("block.{i}")).parameters()
        ),
        "norms": count(stage("block.{i}") + stage("final_norm")),
        "head": count([model]),
        "total": sum(p.numel() for p in seen),
        "buffers": sum(b.numel() for b in model.buffers()),
    }


def forward_times(
    models: Sequence[Any], tokens: Int[Tensor, "batch time"]
) -> list[Quartiles]:
    """Time log_probs of each model in turn.

    Each is timed once in every round, so that a slow moment of the machine
    hits all of them, in 20 rounds or as many as start within 3 seconds.

    Returns:
        For each model the quartiles of its seconds.
    """
    runs = {
        str(number): stopwatch(partial(model.log_probs, tokens), tokens.device)
        for number, model in enumerate(models)
    }
    with torch.inference_mode():
        seconds = interleave(runs, rounds=20, budget=3.0)
    return [quartiles(times) for times in seconds.values()]
