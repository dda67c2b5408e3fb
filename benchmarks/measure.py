"""A forward pass, a training step or decoding: everyone timed in turn.

The clock and the order of a round are shared/timing.py's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_duet.benchmark_results import PERCENTS, Row, Run
from gpt_duet.generation import optimize_for_decoding, stream_tokens
from gpt_duet.protocol import LanguageModel
from gpt_duet.running.context import few_threads
from gpt_duet.timing import clock_for, interleave, percentile, stopwatch
from gpt_duet.training.recipe import Recipe, build_optimizer

from .candidates import Candidate
from .gates import require_as_eager, require_sound
from .machine import limits
from .memory import peak_bytes
from .plan import Plan, Tell, Tokens
from .work import cache_bytes, count_work

# A row to be: its name, what runs, and what else is known of it.
Competitor = tuple[str, Callable[[], object], dict[str, Any]]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, once something was measured: `runs` has the whole rounds."""

    def __init__(self, runs: list[Run]):
        super().__init__()
        self.runs = runs


def measure(
    plan: Plan,
    everyone: list[Candidate],
    notes: list[str],
    tell: Tell = lambda text: None,
) -> list[Run]:
    """Measure what was built for a plan, at each of its sizes.

    Everyone is tested at every size before anything is timed. On the CPU a
    style with a cache is optimized for decoding, as `gpt-duet generate` does.
    Ctrl-C after a whole round raises Stopped.
    """
    if plan.log_probs:
        everyone = [candidate.with_log_probs() for candidate in everyone]
    largest = max(one.parameters or 0 for one in everyone)

    def threads(tokens: Tokens) -> AbstractContextManager[int]:
        # decoding reads a large model's weights on all cores
        work = len(tokens.ids) * (tokens.ids.size(1) + plan.new)
        return few_threads(largest, work, plan.threads)

    ready, vocab_size = [], plan.config.vocab_size
    for tokens in [Tokens(plan, *size) for size in plan.sizes]:
        first = {}
        for one in everyone:
            tell(f"testing {one.name}")
            with threads(tokens):
                first[one.name] = require_sound(one, tokens.ids, vocab_size)
        ready.append((tokens, first))
    decoding = plan.kind == "generate"
    for one in everyone:
        if decoding and one.cached_by == "kit" and plan.device.type == "cpu":
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
    plan: Plan, tokens: Tokens, competitors: Iterable[Competitor],
    notes: list[str], tell: Tell, runs: list[Run],
) -> None:  # fmt: skip
    """Time all in shuffled rounds, on tokens that are drawn again.

    Appends the whole rounds to the runs, even where Ctrl-C ends them.
    """
    device = plan.device
    rows: dict[str, dict[str, Any]] = {}
    watches: dict[str, Callable[[], float]] = {}
    decodings: dict[str, Decoding] = {}
    for name, run, facts in competitors:
        tell(f"running {name}")
        rows[name] = {"peak_bytes": peak_bytes(run, device), **facts}
        watches[name] = stopwatch(run, device)
        if isinstance(run, Decoding):
            decodings[name], watches[name] = run, run.timed
    threads = torch.get_num_threads()
    machine = limits(plan.dtypes[0], device, threads) if plan.limits else []

    def before(number: int) -> None:
        tell(f"round {number + 1} of {plan.rounds}")
        tokens.draw(number)

    batch, time = tokens.ids.shape
    setting = plan.setting(batch, time, threads)
    seconds: dict[str, list[float]] = {}
    try:
        interleave(watches, plan.rounds, before, plan.budget, seconds)
    finally:
        if seconds:
            for name, decoding in decodings.items():
                rows[name] |= decoding.facts(len(seconds[name]))
            found = [Row(n, seconds[n], **facts) for n, facts in rows.items()]
            found += machine
            runs.append(Run(plan.kind, setting, found, plan.reference, notes))


def _passes(
    plan: Plan, tokens: Tokens, everyone: Sequence[Candidate],
    first: Mapping[str, float], tell: Tell,
) -> Iterator[Competitor]:  # fmt: skip
    """Give forward passes, or training steps, eager and compiled."""
    ids, training = tokens.ids, plan.kind == "train-step"
    ours = next(c for c in everyone if c.name == plan.reference)
    if plan.compile:
        torch.compiler.reset()  # one graph for each size, none kept
    for eager in everyone:
        # rows are alike, and one is counted sooner
        flops, moved = row_work(eager, ids[:1], len(ids))
        note = "; ".join(filter(None, (eager.note, eager.compared(ours))))
        timed = [(eager, first[eager.name], note)]
        if plan.compile:
            tell(f"compiling {eager.name}")
            quick = eager.compiled()
            seconds = require_as_eager(quick, eager, ids, grad=training)
            timed.append((quick, seconds, ""))
        for each, seconds, note in timed:
            facts = {
                "first_seconds": seconds,
                # backwards are two products for each of the forwards
                "flops": len(ids) * flops * (3 if training else 1),
                "least_bytes": None if training else moved,
                "tokens": ids.numel(),
                "output": each.output,
                "parameters": each.parameters,
                "note": note,
            }
            run = (
                training_step(each, tokens)
                if training
                else lambda each=each: each.scores(tokens.ids)
            )
            yield each.name, run, facts


def row_work(
    candidate: Candidate, row: Tensor, rows: int
) -> tuple[int, int | None]:
    """Return one row's operations, and the bytes that so many rows move.

    Each weight is read once, and the scores of all rows are written once.
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


class Decoding:
    """Greedy decoding from a prompt; notes how long each token takes."""

    def __init__(self, candidate: Candidate, tokens: Tokens, new: int):
        self._what, self._tokens, self._new = candidate, tokens, new
        self.waits: list[list[float]] = []  # for each token, of each round

    def __call__(self) -> list[float]:
        """Decode; return the seconds until each token."""
        ids = self._tokens.ids
        clock = clock_for(ids.device)
        marks = [clock()]
        decode(self._what, ids, self._new, lambda: marks.append(clock()))
        return [after - before for before, after in pairwise(marks)]

    def timed(self) -> float:
        """Decode twice, and return the seconds of the second time."""
        self()
        self.waits.append(self())
        return sum(self.waits[-1])

    def facts(self, rounds: int) -> dict[str, Any]:
        """Return the time to the first token, and between two others."""
        waits = self.waits[:rounds]
        later = [wait for each in waits for wait in each[1:]]
        percents = PERCENTS if later else ()
        return {
            "first_token": median(each[0] for each in waits),
            "between_tokens": [percentile(later, p) for p in percents],
        }


def _decodings(
    plan: Plan, tokens: Tokens, everyone: Sequence[Candidate]
) -> Iterator[Competitor]:
    """Give greedy decoding from a prompt, with a cache where there is one."""
    batch, prompt = tokens.ids.shape
    for one in everyone:
        run = Decoding(one, tokens, plan.new)
        # the prompt is read with the first new token
        _, moved = row_work(one, tokens.ids[:1, :1], batch)
        cache, cached = None, bool(one.cached_by)
        moved = moved * plan.new if moved and cached else None
        if moved and one.configured:
            size = next(one.model.parameters()).itemsize
            past = range(prompt, prompt + plan.new)
            held = [cache_bytes(plan.config, batch, n, size) for n in past]
            moved, cache = moved + sum(held), held[-1]
        how = f"with{'' if cached else 'out'} a cache"
        facts = {
            "first_seconds": sum(run()),
            "tokens": batch * plan.new,
            "parameters": one.parameters,
            "flops": count_work(run, None)[0],
            "least_bytes": moved,
            "cache_bytes": cache,
            "note": f"{one.note}; {how}" if one.note else how,
        }
        yield one.name, run, facts


def decode(
    candidate: Candidate, ids: Tensor, new: int, each: Callable = int
) -> Tensor:
    """Append new ids, and call `each` when one is there.

    Models of transformers do so themselves, without an end.
    """
    if candidate.cached_by == "transformers":
        return candidate.model.generate(
            ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=new, min_new_tokens=new, do_sample=False,
            use_cache=True, pad_token_id=0,
            # asked at each token whether to stop: no
            stopping_criteria=[lambda ids, scores: bool(each())],
        )  # fmt: skip
    kept = isinstance(candidate.model, LanguageModel)
    columns = (
        stream_tokens(candidate.model, ids.tolist(), new)
        if candidate.reader is None and kept
        else candidate.decode(ids, new)
    )
    for column in columns:
        ids = torch.cat([ids, column[:, None]], dim=1)
        each()
    return ids
