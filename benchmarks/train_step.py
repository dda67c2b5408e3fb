"""How long one training step takes: loss, gradients and update."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shared.training.recipe import Recipe, build_optimizer

from .competitors import (
    Competitor,
    build_peers,
    build_styles,
    compiled,
    parameter_note,
    require_as_eager,
    require_sound,
)
from .forward import (
    Plan,
    Tell,
    Tokens,
    matmul_limit,
    quiet,
    with_seconds,
)
from .limits import forward_flops
from .profiling import peak_bytes, time_by_operation
from .results import Row, Run
from .timing import interleave, stopwatch, time_first


def measure_train_step(plan: Plan, tell: Tell = quiet) -> Run:
    """Measure a step of AdamW, in train mode and without dropout.

    The operations are three times those of the forward pass: the backward
    pass has two products for each of its own.

    A row's first run is its first step. What is not compiled was run
    forwards before, to see that it is sound.

    Args:
        plan: its first batch and time are used.
        tell: called with a few words on what is going on.

    Raises:
        ValueError: for styles that differ, or a peer that is refused.
    """
    config, device, dtype = plan.shape.config, plan.device, plan.dtype
    batch, time = plan.shape.batches[0], plan.shape.times[0]
    # one token more: the last target
    tokens = Tokens(config.vocab_size, batch, time + 1, device)
    styles, difference = build_styles(
        plan.styles, config, tokens.now[:, :-1], dtype
    )
    peers, notes = build_peers(
        plan.peers, config, dtype, device, installed=plan.installed
    )
    everyone = [*styles, *peers]
    for competitor in everyone:
        require_sound(competitor, tokens.now[:, :-1], config.vocab_size)
    if plan.compile:
        torch.compiler.reset()
        everyone = [c for e in everyone for c in (e, compiled(e))]
    ours = styles[-1].parameters or 0
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], float]] = {}
    for number, competitor in enumerate(everyone):
        tell(f"trying {competitor.name}")
        run = training_step(competitor, tokens)
        first = time_first(run, device)
        if competitor.compiled:
            eager, ids = everyone[number - 1], tokens.now[:, :-1]
            require_as_eager(competitor, eager, ids, grad=True)
        told = [competitor.note, parameter_note(competitor, config, ours)]
        rows[competitor.name] = Row(
            competitor.name,
            [],
            flops=3 * forward_flops(config, batch, time),
            tokens=batch * time,
            gives=competitor.gives,
            parameters=competitor.parameters,
            first_seconds=first,
            peak_bytes=peak_bytes(run, device),
            note="; ".join(filter(None, told)),
            operations=time_by_operation(run, device)
            if plan.operations
            else {},
        )
        runs[competitor.name] = stopwatch(run, device)
    matmul, square = matmul_limit(dtype, device)
    runs[matmul.name] = stopwatch(square, device)
    rows[matmul.name] = matmul

    def before(number: int) -> None:
        tell(f"round {number + 1} of {plan.rounds}")
        tokens.draw(number)

    timings = interleave(runs, plan.rounds, before=before)
    notes.append("first run: forwards, all but the compiled were run before")
    if len(plan.styles) > 1:
        agree = f"in float32 the styles agree to {difference:.1e}"
        notes.insert(0, agree)
    return Run(
        "train-step",
        plan.shape.facts(batch, time, dtype, device)
        | {"rounds": plan.rounds, "compile": plan.compile},
        with_seconds(rows, timings),
        reference=plan.styles[-1],
        notes=notes,
    )


def training_step(
    competitor: Competitor, tokens: Tokens
) -> Callable[[], float]:
    """Return a step of training that moves a competitor's weights.

    Args:
        competitor: a module.
        tokens: the batch, with one more token in each row than is read.

    Returns:
        A callable that takes the step and returns the loss before it.

    Raises:
        ValueError: for a competitor without parameters.
    """
    model: Any = competitor.model
    if not isinstance(model, nn.Module):
        raise ValueError(f"{competitor.name} is no module: it cannot train")
    model.train()
    optimizer = build_optimizer(model, Recipe(lr=1e-5))
    loss_of = F.nll_loss if competitor.gives == "log-probs" else (
        F.cross_entropy
    )  # fmt: skip

    def step() -> float:
        scores = competitor.scores(tokens.now[:, :-1])
        loss = loss_of(scores.flatten(0, 1), tokens.now[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        # at the end: a step then frees all that it allocated itself
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
