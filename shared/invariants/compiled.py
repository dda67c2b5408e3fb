"""The compiled program, and compiled masks, compared with what is written.

A proof follows operations as they are written, and so does each test. Where
the user compiles a model, another program is trained: its scores must be
those of the written one to rounding, and no token may move earlier ones.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ..proof.proof import Open, Proof
from ..running.context import modes_kept
from ..running.errors import FailureAt, ModelRaised
from ..running.model.building import Model, unwrapped
from ..running.model.kept_state import KeptState
from ..running.operations import (
    DYNAMO,
    FLEX,
    as_written,
    compiled_frames,
    flex_as_written,
    operations_through,
    runs_compiled,
)
from ..running.places import find_place
from ..running.rounding import floor, gaps
from ..running.subject import Subject
from ..running.tokens import others, spans
from ..running.tolerances import MEASURED_NOISES, SPREAD_OF_ANOTHER_PROGRAM
from ..running.variant import Copy, Variant, own, precise
from ..running.ways import COMPILED, EVAL, OWN, TRAIN, WITH_GRADIENTS, Case
from ..validation import dtype_name
from .leaks import LeakFinder, Trial

TILE = 128  # of FlexAttention's blocks, and of most kernels
MASK_PAIRS = 1 << 26  # of a larger mask the first row and head
SHORT = 5  # tokens of the text that shows whether there are masks
WHOLE = 1 << 29  # a block this large is what torch puts for no mask


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
    start, before, why = perf_counter(), compiled_frames(), ""
    # lengths, by whether gradients are recorded
    at = defaultdict[bool, list[int]](list)
    longest = subject.lengths.fit(subject.block_size)
    lengths = dict.fromkeys([longest, *subject.fit(1, TILE, TILE + 1)])
    with modes_kept([program]), as_written():
        try:
            for time, case in product(lengths, _cases(variant)):
                with subject.budget.part(COMPILED.name, time, 1 / 2):
                    dtype = _compare(variant.run_as(case), time)
                    at[case.grad].append(time)
        except ModelRaised as error:
            why = str(error)
        finally:
            if kept is not None:
                kept.put_back()
    if at[False] and compiled_frames() == before:
        why = "dynamo leaves all of it to Python"
    if why:
        proof.holds = False
        text = f"the compiled program did not run: {why}"
        proof.open.append(Open(text))
        return ""
    if not at[False]:
        proof.left_out.append("the compiled program")
        return ""
    proof.program.append("compiled")
    graph = f", with gradients at {spans(at[True])}" * bool(at[True])
    return (
        f"the proof is of the program as it is written; compiled, in "
        f"{dtype} on {subject.device}, it gives the same scores at "
        f"{spans(at[False])}{graph}, and shows no "
        f"leak there ({perf_counter() - start:.0f} s to compile and compare)"
    )


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
    noise = _rounding(written, tokens, expected)
    bound = floor(expected) + MEASURED_NOISES * noise
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
    after = torch.arange(time) >= torch.tensor(splits).unsqueeze(1)
    drawn = others(tokens, subject.vocab_size, subject.generator())
    changed = torch.where(after, drawn, tokens)
    leak = LeakFinder().find(Trial(compiled, tokens, changed, splits))
    if leak is not None:
        raise AssertionError(
            f"compiled, position {leak.position} sees the tokens from "
            f"{splits[leak.row]} on: at length {time} its scores move by "
            f"{leak.size:.2g} {compiled.precision(leak.dtype, leak.noise)}"
        )


def _rounding(
    written: Variant, tokens: Int[Tensor, "rows time"], scores: Tensor
) -> float:
    """Return how far scores are from those in float64."""
    with suppress(ModelRaised):
        exact = precise(written.subject).run_as(written.case).scores(tokens)
        if exact.dtype == torch.float64:
            return float(gaps(scores.double(), exact).max())
    return SPREAD_OF_ANOTHER_PROGRAM / MEASURED_NOISES * float(scores.std())


def require_true_blocks(subject: Subject) -> str:
    """Hold each BlockMask against its mask_mod; return what was looked at.

    Eager FlexAttention asks mask_mod of each pair. The compiled kernel asks
    it in partial blocks alone: a full block is visible as a whole, one that
    is not listed is not seen. Lists that say anything else are two functions.

    Raises:
        AssertionError: names the lines, the block and the first pair.
    """
    if FLEX not in sys.modules or not subject.is_module:
        return ""
    seen, done = _Masks(), list[int]()
    with flex_as_written():
        variant = own(subject)
        for wanted in _lengths_of_masks(subject, seen):
            time = subject.lengths.fit(wanted)
            if time > subject.block_size or time in done:
                continue
            done.append(time)
            tokens = subject.draw(subject.fit_rows(2), time)
            for case in (EVAL, TRAIN):
                with (
                    subject.budget.part("block masks", time, 1 / 6),
                    operations_through(seen),
                ):
                    variant.run_as(case).scores(tokens)
                if seen.untrue is not None:
                    raise seen.untrue
    if not seen.sizes:
        return ""
    lengths = ", ".join(map(str, sorted(done)))
    return f"the lists of each BlockMask match its mask_mod at {lengths}"


def _lengths_of_masks(subject: Subject, seen: "_Masks") -> Iterator[int]:
    """Yield lengths of texts, then those near the blocks that were seen."""
    yield SHORT
    # some models make masks for long texts alone
    if seen.sizes or not subject.takes_seconds(subject.block_size):
        yield subject.block_size
    for size in sorted(seen.sizes):
        yield from (size - 1, size, size + 1, 2 * size)


class _Masks:
    """Looks at the mask of each flex_attention."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()  # of blocks
        # how a mask's lists contradict its mask_mod
        self.untrue: FailureAt | None = None

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operation; look at its mask, if it has one."""
        if name == "flex_attention":
            *_, size, other, _ = args[4]
            if max(size, other) < WHOLE:
                self.sizes |= {size, other}
                self.untrue = self.untrue or _untrue(args[0], args[1], args[4])
        return func(*args, **kwargs)


def _untrue(
    query: Tensor, key: Tensor, blocks: tuple[Any, ...]
) -> FailureAt | None:
    """Return how a mask's lists contradict its mask_mod, if they do."""
    *_, high, wide, mask_mod = blocks
    rows, heads, tall, long = *query.shape[:2], query.size(2), key.size(2)
    if rows * heads * tall * long > MASK_PAIRS:
        rows = heads = 1
    flex: Any = sys.modules[FLEX]
    shown = flex.create_mask(mask_mod, rows, heads, tall, long, query.device)
    partial = _listed(blocks[2], blocks[3])[:rows, :heads]
    full = torch.zeros_like(partial)
    if blocks[4] is not None:
        full = _listed(blocks[4], blocks[5])[:rows, :heads]

    def pairs(where: Bool[Tensor, "rows heads down across"]) -> Tensor:
        """Return for each pair whether its block is one of these."""
        spread = where.repeat_interleave(high, 2).repeat_interleave(wide, 3)
        return spread[:, :, :tall, :long]

    place = getattr(blocks[2], "made", (None, False))[0]
    made = "" if place is None else f", made at {place},"
    for wrong, words in (
        (
            pairs(full) & ~shown,
            "is listed as full, and mask_mod hides position {1} from {0}: the "
            "compiled kernel does not ask it there, and lets {0} see {1}",
        ),
        (
            ~(pairs(full) | pairs(partial)) & shown,
            "is left out, and mask_mod shows position {1} to {0}: the "
            "compiled kernel does not let {0} see {1}, the eager one does",
        ),
    ):
        found = wrong.nonzero()
        if not len(found):
            continue
        later = found[found[:, 3] > found[:, 2]]
        one, other = [*later, *found[:1]][0][2:].tolist()
        used = find_place("")
        return FailureAt(
            f"the BlockMask of {used}{made} is not its mask_mod: "
            f"block ({one // high}, {other // wide}) of {high} x {wide} "
            f"{words.format(one, other)} (length {tall})",
            used,
            place,
        )
    return None


def _listed(
    count: Tensor, index: Tensor
) -> Bool[Tensor, "rows heads down across"]:
    """Return which blocks of a row are among the first of its list.

    A mask that was cut from a longer one may list blocks behind its end.
    """
    among = torch.arange(index.size(-1), device=index.device)
    among = among < count.unsqueeze(-1)
    width = max(index.size(-1), int(index.max()) + 1)
    times = torch.zeros(*index.shape[:-1], width, dtype=torch.long)
    times = times.to(index.device)
    return times.scatter_add_(-1, index.long(), among.long()) > 0
