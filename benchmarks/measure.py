"""A forward pass, a training step or decoding: everyone timed in turn.

The clock and the order of a round are shared/timing.py's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_duet.comparison.benchmark_results import Row, Run
from gpt_duet.generation import generate, optimize_for_decoding
from gpt_duet.invariants.context import few_threads
from gpt_duet.protocol import LanguageModel
from gpt_duet.timing import interleave, stopwatch, time_first
from gpt_duet.training.recipe import Recipe, build_optimizer

from .gates import require_as_eager, require_sound
from .machine import limits
from .models import (
    Candidate,
    build_peers,
    build_styles,
    fit_to_peers,
    parameter_note,
)
from .plan import Plan, Tokens
from .profiling import peak_bytes, time_by_operation
from .work import cache_bytes, count_work

Tell = Callable[[str], None]
# A row to be: its name, what runs, and what else is known of it.
Competitor = tuple[str, Callable[[], object], dict[str, Any]]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, once something was measured: `runs` has the whole rounds."""

    def __init__(self, runs: list[Run]):
        super().__init__()
        self.runs = runs


def measure(plan: Plan, tell: Tell = lambda text: None) -> list[Run]:
    """Measure what a plan asks for, at each of its sizes.

    Everyone is tested at every size before anything is timed. On the CPU a
    style with a cache is optimized for decoding, as `gpt-duet generate` does.

    Raises:
        Stopped: for Ctrl-C after a whole round.
    """
    tell("building")
    peers, left_out = build_peers(plan)
    plan = fit_to_peers(plan, peers)
    longest = Tokens(plan, 1, max(plan.times)).ids
    everyone, notes = build_styles(plan, longest)
    everyone, notes = everyone + peers, notes + left_out
    if plan.log_probs:
        everyone = [candidate.with_log_probs() for candidate in everyone]
    largest = max(one.parameters or 0 for one in everyone)

    def threads(tokens: Tokens) -> AbstractContextManager[int]:
        # decoding reads a large model's weights on all cores
        work = len(tokens.ids) * (tokens.ids.size(1) + plan.new)
        return few_threads(largest, work, plan.threads)

    ready = []
    for tokens in [Tokens(plan, *size) for size in plan.sizes]:
        first = {}
        for one in everyone:
            tell(f"testing {one.name}")
            vocab_size = plan.config.vocab_size
            with threads(tokens):
                first[one.name] = require_sound(one, tokens.ids, vocab_size)
        ready.append((tokens, first))
    decoding = plan.kind == "generate"
    for one in everyone:
        if decoding and one.cached and plan.device.type == "cpu":
            optimize_for_decoding(one.model)
    runs: list[Run] = []
    try:
        with torch.inference_mode(plan.kind != "train-step"):
            for tokens, first in ready:
                competitors = (
                    _decodings(plan, tokens, everyone)
                    if decoding
                    else _passes(plan, tokens, everyone, first, tell)
                )
                with threads(tokens):
                    _time(plan, tokens, competitors, notes, tell, runs)
    except KeyboardInterrupt:
        raise (Stopped(runs) if runs else KeyboardInterrupt) from None
    return runs


def _time(
    plan: Plan,
    tokens: Tokens,
    competitors: Iterable[Competitor],
    notes: list[str],
    tell: Tell,
    runs: list[Run],
) -> None:
    """Time all in shuffled rounds, on tokens that are drawn anew.

    Appends the whole rounds to the runs, even where Ctrl-C ends them.
    """
    device = plan.device
    rows: dict[str, dict[str, Any]] = {}
    watches: dict[str, Callable[[], float]] = {}
    for name, run, facts in competitors:
        tell(f"running {name}")
        rows[name] = {"peak_bytes": peak_bytes(run, device), **facts}
        if plan.profile:
            rows[name]["operations"] = time_by_operation(run, device)
        watches[name] = stopwatch(run, device)
    machine = limits(plan.dtypes[0], device) if plan.limits else []

    def before(number: int) -> None:
        tell(f"round {number + 1} of {plan.rounds}")
        tokens.draw(number)

    batch, time = tokens.ids.shape
    setting = plan.setting(batch, time, torch.get_num_threads())
    seconds: dict[str, list[float]] = {}
    try:
        interleave(watches, plan.rounds, before, plan.budget, seconds)
    finally:
        if seconds:
            timed = [Row(n, seconds[n], **facts) for n, facts in rows.items()]
            timed += machine
            runs.append(Run(plan.kind, setting, timed, plan.reference, notes))


def _passes(
    plan: Plan,
    tokens: Tokens,
    everyone: Sequence[Candidate],
    first: Mapping[str, float],
    tell: Tell,
) -> Iterator[Competitor]:
    """Give forward passes, or training steps, eager and compiled."""
    ids, training = tokens.ids, plan.kind == "train-step"
    ours = next(c for c in everyone if c.name == plan.reference)

    def competitor(
        c: Candidate, seconds: float, work: tuple, note: str = ""
    ) -> Competitor:
        flops, moved = work
        step = training_step(c, tokens) if training else None
        facts = {
            "first_seconds": seconds,
            # backwards are two products for each of the forwards
            "flops": 3 * flops if training else flops,
            "least_bytes": None if training else moved,
            "tokens": ids.numel(),
            "output": c.output,
            "parameters": c.parameters,
            "note": note,
        }
        return c.name, step or (lambda: c.scores(tokens.ids)), facts

    if plan.compile:
        torch.compiler.reset()  # one graph for each size, none kept
    for eager in everyone:
        # rows are alike, and one is counted sooner
        flops, moved = row_work(eager, ids[:1], len(ids))
        work = len(ids) * flops, moved
        why = parameter_note(eager, ours.parameters or 0)
        note = "; ".join(filter(None, (eager.note, why)))
        yield competitor(eager, first[eager.name], work, note)
        if plan.compile:
            tell(f"compiling {eager.name}")
            quick = eager.compiled()
            seconds = require_as_eager(quick, eager, ids, grad=training)
            yield competitor(quick, seconds, work)


def row_work(
    candidate: Candidate, row: Tensor, rows: int
) -> tuple[int, int | None]:
    """Return one row's operations, and the bytes that so many rows move.

    That is at least: each weight is read once, and the scores of all rows
    are written once.
    """
    flops, read = count_work(partial(candidate.scores, row), candidate.model)
    if read is None:
        return flops, None
    with torch.no_grad():
        return flops, read + rows * candidate.scores(row).nbytes


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


def _decodings(
    plan: Plan, tokens: Tokens, everyone: Sequence[Candidate]
) -> Iterator[Competitor]:
    """Give greedy decoding from a prompt.

    A model with a cache reads each token once, one without reads the whole
    text for each new token.
    """
    batch, prompt = tokens.ids.shape
    for candidate in everyone:

        def run(candidate: Candidate = candidate) -> Tensor:
            return decode(candidate, tokens.ids, plan.new)

        cached = (
            candidate.cached
            or candidate.decoder is not None
            or _generates(candidate.model)
        )
        # the prompt is read with the first new token
        how = "" if cached else "out"
        _, moved = row_work(candidate, tokens.ids[:1, :1], batch)
        if not cached:
            moved = None
        elif moved is not None:
            moved *= plan.new
            if candidate.configured:
                size = next(candidate.model.parameters()).itemsize
                moved += sum(
                    cache_bytes(plan.config, batch, past, size)
                    for past in range(prompt, prompt + plan.new)
                )
        facts = {
            "first_seconds": time_first(run, plan.device),
            "tokens": batch * plan.new,
            "parameters": candidate.parameters,
            "least_bytes": moved,
            "note": "; ".join(
                filter(None, (candidate.note, f"with{how} a cache"))
            ),
        }
        yield candidate.name, run, facts


def _generates(model: object) -> bool:
    """Whether a model decodes itself, as those of transformers do."""
    return hasattr(model, "generation_config")


def decode(candidate: Candidate, ids: Tensor, new: int) -> Tensor:
    """Append new ids; transformers does so itself, without an end.

    Anyone's model that keeps no contract is read whole for each of them.
    """
    if candidate.decoder is not None:
        return candidate.decode(ids, new)
    if _generates(candidate.model):
        return candidate.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    if isinstance(candidate.model, LanguageModel):
        return generate(candidate.model, ids, new)
    for _ in range(new):
        likeliest = candidate.scores(ids)[:, -1:].argmax(dim=-1)
        ids = torch.cat([ids, likeliest], dim=1)
    return ids
