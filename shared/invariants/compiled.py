"""The compiled program, held against the one that is written.

A proof follows operations as they are written, and so does each test. Where
the user compiles a model, another program is trained: its scores must be
those of the written one to rounding, and no token may move earlier ones.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from time import perf_counter

import torch
from jaxtyping import Int
from torch import Tensor, nn

from .cases import COMPILED, EVAL, OWN, TRAIN, WITH_GRADIENTS, Case
from .context import modes_kept
from .dependence.proof import Open, Proof
from .errors import ModelRaised
from .model.building import KeptState, Model, unwrapped
from .moves.leaks import LeakFinder, Trial
from .rounding import dtype_name, floor, gaps
from .stances import DYNAMO, as_written, compiled_frames, runs_compiled
from .subject import Subject
from .tokens import others, spans
from .variant import Copy, Variant, precise

TILE = 128  # of FlexAttention's blocks, and of most kernels
WORSE = 8  # times the rounding of the written program
APART = 1e-2  # share of the deviation of scores, where float64 cannot run


def require_same_program(subject: Subject, proof: Proof) -> str:
    """Hold the compiled program against the written one, if there is one.

    Returns:
        The sentence of a certificate: which program it is of. Where the
        compiled one could not be run, the proof does not hold.

    Raises:
        AssertionError: names the position, the difference and the length.
    """
    if DYNAMO not in sys.modules and not subject.compile:
        return ""
    program, short = subject.builder.program(), subject.draw(1, 5)
    variant = _variant(subject, program)
    with modes_kept([program]), as_written():
        found = runs_compiled(lambda: variant.answer(short))
    if not found:
        if not subject.compile:
            return ""
        program = torch.compile(subject.builder.build())
        variant = _variant(subject, program)
    inner = unwrapped(program)
    kept = KeptState(inner) if isinstance(inner, nn.Module) else None
    torch._dynamo.reset()  # a frame that a mode saw would be left to Python
    start, before, done = perf_counter(), compiled_frames(), Done()
    with modes_kept([program]), as_written():
        try:
            for time, case in product(_lengths(subject), _cases(variant)):
                with subject.budget.part(COMPILED.name, time, 1 / 2):
                    done.dtype = _compare(variant.run_as(case), time)
                    done.at[case.grad].append(time)
        except ModelRaised as error:
            done.why = str(error)
        finally:
            if kept is not None:
                kept.put_back()
    if done.at[False] and compiled_frames() == before:
        done.why = "dynamo leaves all of it to Python"
    if done.why:
        proof.holds = False
        text = f"the compiled program did not run: {done.why}"
        proof.open.append(Open(text))
        return ""
    if not done.at[False]:
        proof.left_out.append("the compiled program")
        return ""
    graph = f", with gradients at {spans(done.at[True])}"
    return (
        f"the proof is of the program as it is written; compiled, in "
        f"{done.dtype} on {subject.device}, it gives the same scores at "
        f"{spans(done.at[False])}{graph * bool(done.at[True])}, and shows no "
        f"leak there ({perf_counter() - start:.0f} s to compile and compare)"
    )


@dataclass
class Done:
    """Lengths that were compared, without and with gradients recorded."""

    at: dict[bool, list[int]] = field(
        default_factory=lambda: {False: [], True: []}
    )
    dtype: str = ""
    why: str = ""  # the program did not run


def _lengths(subject: Subject) -> list[int]:
    """Return the longest length, then one token and those around a tile."""
    longest = subject.lengths.fit(subject.block_size)
    rest = [t for t in subject.fit(1, TILE, TILE + 1) if t != longest]
    return [longest, *rest]


def _variant(subject: Subject, program: Model) -> Variant:
    # a module's call is compiled, if it answers with scores
    own = subject.caller.log_probs and OWN not in subject.unanswered
    return Variant(subject, Copy(program), replace(EVAL, own=own))


def _cases(variant: Variant) -> list[Case]:
    """Return the cases that are compared: none in which numbers are drawn."""
    own, subject = variant.case.own, variant.subject
    if subject.caller.no_gradients or not variant.parameters:
        return [variant.case]
    train = replace(TRAIN, own=own)
    if variant.run_as(train).draws(subject.draw(1, 5)):
        train = replace(WITH_GRADIENTS, own=own)
    return [variant.case, train]


def _compare(written: Variant, time: int) -> str:
    """Require equal scores of both programs, and no leak of the compiled.

    Returns the dtype of the scores.
    """
    subject, case = written.subject, written.case
    tokens = subject.draw(subject.fit_rows(2), time)
    compiled = written.run_as(
        replace(COMPILED, training=case.training, grad=case.grad, own=case.own)
    )
    expected, scores = written.scores(tokens), compiled.scores(tokens)
    bound = floor(expected) + WORSE * _rounding(written, tokens, expected)
    apart, dtype = gaps(scores, expected), dtype_name(scores.dtype)
    if not float(apart.max()) <= bound:
        row, at = divmod(int(apart.argmax()), time)
        raise AssertionError(
            f"the compiled program is another function: position {at} "
            f"differs by {float(apart[row, at]):.2g} at length {time} "
            f"({case.name}, {dtype}; rounding explains {bound:.1g})"
        )
    if time > 1:
        _require_no_leak(compiled, tokens)
    return dtype


def _require_no_leak(
    compiled: Variant, tokens: Int[Tensor, "rows time"]
) -> None:
    subject, time = compiled.subject, tokens.size(1)
    splits = [max(1, time // 2), time - 1][: len(tokens)]
    changed = tokens.clone()
    for row, split in enumerate(splits):
        changed[row, split:] = others(
            tokens[row, split:], subject.vocab_size, subject.generator()
        )
    leak = LeakFinder().find(Trial(compiled, tokens, changed, splits))
    if leak is not None:
        raise AssertionError(
            f"compiled, position {leak.position} sees the tokens from "
            f"{splits[leak.row]} on: at length {time} its scores move by "
            f"{leak.size:.2g} ({leak.dtype}{compiled.conditions}; rounding "
            f"there is {leak.noise:.1g})"
        )


def _rounding(
    written: Variant, tokens: Int[Tensor, "rows time"], scores: Tensor
) -> float:
    """Return how far scores are from those in float64."""
    with suppress(ModelRaised):
        exact = precise(written.subject).run_as(written.case).scores(tokens)
        if exact.dtype == torch.float64:
            return float(gaps(scores.double(), exact).max())
    return APART / WORSE * float(scores.std())
