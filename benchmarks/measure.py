"""Time forward passes, training steps or decoding, all models in turn.

shared/timing.py reads the clock, and orders the models within each round.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_duet.benchmark_results import PERCENTS, Row, Run
from gpt_duet.generation import optimize_for_decoding, stream_tokens
from gpt_duet.protocol import LanguageModel
from gpt_duet.running.context import few_threads
from gpt_duet.timing import (
    clock_for,
    cold_stopwatch,
    interleave,
    median_error,
    percentile,
    ratios,
    stopwatch,
)
from gpt_duet.training.recipe import Recipe, build_optimizer

from .candidates import Candidate
from .gates import require_as_eager, require_sound
from .machine import cache_flusher, limits
from .memory import peak_bytes
from .plan import Plan, Tell, Tokens
from .work import cache_bytes, count_work

# A row to measure: its name, the function to run, and other facts.
Competitor = tuple[str, Callable[[], object], dict[str, Any]]
LEAST_ROUNDS = 10  # fewest rounds of --until, so that quartiles mean something


class Stopped(KeyboardInterrupt):
    """Raised after Ctrl-C in a measurement; `runs` has the results so far."""

    def __init__(self, runs: list[Run]):
        super().__init__()
        self.runs = runs


def measure(
    plan: Plan,
    everyone: list[Candidate],
    notes: list[str],
    tell: Tell = lambda text: None,
) -> list[Run]:
    """Measure the candidates of a plan at each of its sizes.

    All candidates are tested at every size before any is timed. On the CPU, a
    style with a cache is optimized for decoding, as in `gpt-duet generate`. If
    Ctrl-C comes after at least one whole round, Stopped is raised.
    """
    if plan.log_probs:
        everyone = [candidate.with_log_probs() for candidate in everyone]
    largest = max(one.parameters or 0 for one in everyone)

    def threads(tokens: Tokens) -> AbstractContextManager[int]:
        # count all tokens of a run, even in decoding, because a large model's
        # weights are read faster by all cores together
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
    """Time all competitors in shuffled rounds, with new tokens each time.

    Append the results of all whole rounds to `runs`, even after Ctrl-C.
    """
    device = plan.device
    flush = cache_flusher(device) if plan.cold else lambda: None
    rows: dict[str, dict[str, Any]] = {}
    watches: dict[str, Callable[[], float]] = {}
    decodings: dict[str, Decoding] = {}
    for name, run, facts in competitors:
        tell(f"running {name}")
        rows[name] = {"peak_bytes": peak_bytes(run, device), **facts}
        watches[name] = (
            cold_stopwatch(run, device, flush)
            if plan.cold
            else stopwatch(run, device)
        )
        if isinstance(run, Decoding):
            run.flush = flush
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
        interleave(
            watches,
            plan.rounds,
            before,
            plan.budget,
            seconds,
            lambda found: 0 < plan.until >= ratio_error(plan.reference, found),
        )
    finally:
        if seconds:
            for name, decoding in decodings.items():
                rows[name] |= decoding.facts(len(seconds[name]))
            found = [Row(n, seconds[n], **facts) for n, facts in rows.items()]
            found += machine
            said = [*notes]
            if plan.until:
                said.append(_error_reached(plan, seconds))
            runs.append(Run(plan.kind, setting, found, plan.reference, said))


def _error_reached(plan: Plan, seconds: Mapping[str, list[float]]) -> str:
    error = ratio_error(plan.reference, seconds)
    rounds = len(seconds[plan.reference])
    if error == math.inf:
        return f"{rounds} rounds are too few to know the ratios' error"
    words = f"each ratio is known within {error:.1%} after {rounds} rounds"
    missed = error > plan.until
    return f"{words}, not within {plan.until:.1%}" if missed else words


def ratio_error(
    reference: str, seconds: Mapping[str, Sequence[float]]
) -> float:
    """Return the largest relative error of all ratios to the reference.

    If only the reference is measured, return the error of its time.
    """
    ours = seconds[reference]
    if len(ours) < LEAST_ROUNDS:
        return math.inf
    errors = [
        median_error(ratios(times, ours))
        for name, times in seconds.items()
        if name != reference
    ]
    return max(errors, default=median_error(ours))


def _passes(
    plan: Plan, tokens: Tokens, everyone: Sequence[Candidate],
    first: Mapping[str, float], tell: Tell,
) -> Iterator[Competitor]:  # fmt: skip
    """Yield forward passes, or training steps, eager and compiled."""
    ids, training = tokens.ids, plan.kind == "train-step"
    ours = next(c for c in everyone if c.name == plan.reference)
    if plan.compile:
        torch.compiler.reset()  # frees the compiled graphs of other sizes
    for eager in everyone:
        # count the work of one row, because all rows require the same
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
                # times 3, because the backward pass has two products for each
                # product of the forward pass
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
    """Count the operations of one row, and the bytes that all rows move.

    Each weight is read once for all rows; the scores of each row are written.
    """
    flops, read = count_work(partial(candidate.scores, row), candidate.model)
    if read is None:
        return flops, None
    with torch.no_grad():
        return flops, read + rows * candidate.scores(row).nbytes


def training_step(candidate: Candidate, tokens: Tokens) -> Callable[[], float]:
    """Return a function that takes a step of AdamW and returns the loss."""
    model: Any = candidate.model
    if not isinstance(model, nn.Module):
        raise ValueError(f"{candidate.name} is not a module: it cannot train")
    model.train()
    optimizer = build_optimizer(model, Recipe(lr=1e-5))
    log_probs = candidate.output == "log-probs"
    loss_of = F.nll_loss if log_probs else F.cross_entropy

    def step() -> float:
        scores = candidate.scores(tokens.ids)
        loss = loss_of(scores.flatten(0, 1), tokens.targets.flatten())
        loss.backward()
        optimizer.step()
        # last, so that each step frees the gradients that it has allocated
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


class Decoding:
    """Greedy decoding from a prompt, with the time of each token."""

    def __init__(self, candidate: Candidate, tokens: Tokens, new: int):
        self._what, self._tokens, self._new = candidate, tokens, new
        self.flush: Callable[[], None] = lambda: None  # empties the caches
        self.waits: list[list[float]] = []  # by round, each token's seconds

    def __call__(self) -> list[float]:
        """Decode a text; return the seconds that each new token took."""
        ids = self._tokens.ids
        clock, waits = clock_for(ids.device), []

        def start() -> None:
            self.flush()
            self._start = clock()

        def stop() -> None:
            waits.append(clock() - self._start)
            start()

        start()
        decode(self._what, ids, self._new, stop)
        return waits

    def timed(self) -> float:
        """Decode twice, and return the seconds of the second run."""
        self()
        self.waits.append(self())
        return sum(self.waits[-1])

    def facts(self, rounds: int) -> dict[str, Any]:
        """Return the times until the first token and between later tokens."""
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
    """Yield greedy decoding from a prompt, with a cache if there is one."""
    batch, prompt = tokens.ids.shape
    for one in everyone:
        run = Decoding(one, tokens, plan.new)
        # one pass for each new token: reading the prompt yields the first
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
    """Append new ids, and call `each` after each of them.

    A model of transformers generates the ids by its own method.
    """
    if candidate.cached_by == "transformers":
        return candidate.model.generate(
            ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=new, min_new_tokens=new, do_sample=False,
            use_cache=True, pad_token_id=0,
            # transformers calls it after each token; False means not to stop
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
