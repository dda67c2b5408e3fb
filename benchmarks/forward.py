"""How long a forward pass, or a training step, takes: everyone in turn."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpt_duet.comparison.benchmark_results import Run
from gpt_duet.training.recipe import Recipe, build_optimizer

from .gates import require_as_eager, require_sound
from .models import Candidate, build_peers, build_styles, parameter_note
from .plan import Plan, Tokens
from .timing import Rounds, Tell
from .work import count_flops, least_bytes


def measure_forward(plan: Plan, tell: Tell = lambda text: None) -> list[Run]:
    """Measure a pass, or a training step, at each batch and time of a plan.

    Everyone is tested at every size before anything is timed; peers on the
    longest text first, so that one that cannot read it is told at once.
    """
    tell("building")
    longest = Tokens(plan, 1, max(plan.times))
    peers, left_out = build_peers(plan)
    for peer in peers:
        tell(f"testing {peer.name}")
        require_sound(peer, longest.ids, plan.config.vocab_size)
    everyone, notes = build_styles(plan, longest.ids, plan.dtypes[0])
    everyone, notes = everyone + peers, notes + left_out
    if plan.log_probs:
        everyone = [candidate.with_log_probs() for candidate in everyone]
    ready = []
    for tokens in [Tokens(plan, *size) for size in plan.sizes]:
        first = {}
        for one in everyone:
            tell(f"testing {one.name}")
            vocab_size = plan.config.vocab_size
            first[one.name] = require_sound(one, tokens.ids, vocab_size)
        ready.append((tokens, first))
    with torch.inference_mode(plan.kind == "forward"):
        return [
            _prepare(plan, *sized, everyone, tell).measure(sized[0], notes)
            for sized in ready
        ]


def _prepare(
    plan: Plan,
    tokens: Tokens,
    first: dict[str, float],
    everyone: Sequence[Candidate],
    tell: Tell,
) -> Rounds:
    """Return everyone, found sound, ready to be timed at one size."""
    config, ids = plan.config, tokens.ids
    training = plan.kind == "train-step"
    moved = least_bytes(config, len(ids), ids.size(1), plan.dtypes[0].itemsize)
    ours = next(c for c in everyone if c.name == plan.styles[-1])
    rounds = Rounds(plan, tell)

    def add(c: Candidate, seconds: float, flops: int, *notes: str) -> None:
        rounds.add(
            c.name,
            training_step(c, tokens)
            if training
            else lambda: c.scores(tokens.ids),
            first_seconds=seconds,
            # backwards are two products for each of the forwards
            flops=3 * flops if training else flops,
            least_bytes=None if training else moved,
            tokens=ids.numel(),
            output=c.output,
            parameters=c.parameters,
            note="; ".join(filter(None, notes)),
        )

    if plan.compile:
        torch.compiler.reset()  # one graph for each size, none kept
    for eager in everyone:
        # rows are alike, and one is counted sooner
        flops = len(ids) * count_flops(partial(eager.scores, ids[:1]))
        why = parameter_note(eager, config, ours.parameters or 0)
        add(eager, first[eager.name], flops, eager.note, why)
        if plan.compile:
            tell(f"compiling {eager.name}")
            quick = eager.compiled()
            seconds = require_as_eager(quick, eager, ids, grad=training)
            add(quick, seconds, flops)
    return rounds


def training_step(candidate: Candidate, tokens: Tokens) -> Callable[[], float]:
    """Return a step of AdamW in train mode; it returns the loss before."""
    model: Any = candidate.model
    if not isinstance(model, nn.Module):
        raise ValueError(f"{candidate.name} is no module: it cannot train")
    model.train()
    optimizer = build_optimizer(model, Recipe(lr=1e-5))
    log_probs = candidate.output == "log-probs"
    loss_of = F.nll_loss if log_probs else F.cross_entropy

    def step() -> float:
        scores = candidate.scores(tokens.ids)
        loss = loss_of(scores.flatten(0, 1), tokens.targets.flatten())
        loss.backward()
        optimizer.step()
        # at the end: a step then frees all that it allocated itself
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
