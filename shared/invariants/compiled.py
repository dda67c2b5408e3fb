"""Compare the compiled program, and compiled masks, with the original.

The proof and all other tests run a model uncompiled. But a user who compiles
the model trains another program. Its scores must equal the original's up to
rounding, and no token may move earlier scores.
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

TILE = 128  # tokens of a block in FlexAttention, and a tile of most kernels
MASK_PAIRS = 1 << 26  # a larger mask is compared in its first row and head
SHORT = 5  # tokens of a text that shows whether the model has masks
WHOLE = 1 << 29  # the block size in torch's BlockMask for no mask


def require_same_program(subject: Subject, proof: Proof) -> str:
    """Compare the compiled model with the original, if the user compiles it.

    Returns:
        A sentence about the compiled program, for the report; "" if nothing
        was compared. If the program could not be run, the proof is left open.

    Raises:
        AssertionError: with the position, the difference and the length.
    """
    if DYNAMO not in sys.modules and not subject.compile:
        return ""
    if subject.heavy:
        subject.kept.clear()  # the compiled program is a copy and needs memory
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
    torch._dynamo.reset()  # dynamo would skip frames that a mode has observed
    start, before, why = perf_counter(), compiled_frames(), ""
    # the compared lengths, by whether gradients are recorded
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
        proof.leave_open(Open(f"the compiled program did not run: {why}"))
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
    # compare the module's own call, as it is compiled, if it returns scores
    own = subject.caller.log_probs and OWN not in subject.unanswered
    return Variant(subject, Copy(program), replace(EVAL, own=own))


def _cases(variant: Variant) -> list[Case]:
    """Return the cases (ways to call) that draw no random numbers."""
    own, subject = variant.case.own, variant.subject
    if subject.caller.no_gradients or not variant.parameters:
        return [variant.case]
    train = replace(TRAIN, own=own)
    if variant.run_as(train).draws(subject.draw(1, 5)):
        train = replace(WITH_GRADIENTS, own=own)
    return [variant.case, train]


def _compare(written: Variant, time: int) -> str:
    """Require equal scores of both programs; the compiled one may not leak.

    Return the dtype of the scores.
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
    """Return how far scores are from the same scores in float64."""
    with suppress(ModelRaised):
        exact = precise(written.subject).run_as(written.case).scores(tokens)
        if exact.dtype == torch.float64:
            return float(gaps(scores.double(), exact).max())
    return SPREAD_OF_ANOTHER_PROGRAM / MEASURED_NOISES * float(scores.std())


def require_true_blocks(subject: Subject) -> str:
    """Compare each BlockMask with its mask_mod; return what was compared.

    Eager FlexAttention calls mask_mod for each pair of positions. The compiled
    kernel calls it only in blocks listed as partial. It shows blocks listed as
    full, and hides all others. With wrong lists, the eager and the compiled
    model differ.

    Raises:
        AssertionError: if a mask contradicts its mask_mod at two positions.
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
    """Yield lengths of texts to try, then some near the block sizes seen."""
    yield SHORT
    # also the longest text, because some models make masks only for long texts
    if seen.sizes or not subject.takes_seconds(subject.block_size):
        yield subject.block_size
    for size in sorted(seen.sizes):
        yield from (size - 1, size, size + 1, 2 * size)


class _Masks:
    """Inspects the mask of each call of flex_attention."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()  # sizes of blocks in the masks so far
        # the contradiction between a mask's lists and its mask_mod
        self.untrue: FailureAt | None = None

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation; inspect its mask, if it has one."""
        if name == "flex_attention":
            *_, size, other, _ = args[4]
            if max(size, other) < WHOLE:
                self.sizes |= {size, other}
                self.untrue = self.untrue or _untrue(args[0], args[1], args[4])
        return func(*args, **kwargs)


def _untrue(
    query: Tensor, key: Tensor, blocks: tuple[Any, ...]
) -> FailureAt | None:
    """Return how a mask's lists contradict its mask_mod, or None."""
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
        """Return, for each pair of positions, whether its block is listed."""
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
            "compiled kernel hides it from {0}, the eager kernel shows it",
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
    """Return which blocks each row of a mask lists.

    Only the first `count` entries of a list are used. A mask that was cut from
    a longer mask may list blocks beyond its end.
    """
    among = torch.arange(index.size(-1), device=index.device)
    among = among < count.unsqueeze(-1)
    width = max(index.size(-1), int(index.max()) + 1)
    times = torch.zeros(*index.shape[:-1], width, dtype=torch.long)
    times = times.to(index.device)
    return times.scatter_add_(-1, index.long(), among.long()) > 0
