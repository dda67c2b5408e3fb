"""The smallest case of a leak, and the failure that it becomes.

It is the shortest sequence in which changing one token still moves an earlier
score, told with its place and its map.
"""

import math
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ....proof.proof import Proof
from ....running.errors import Leaked
from ....running.rounding import floor_of
from ....running.tokens import SHORT, draw, others
from ....running.variant import Variant
from ....tracing.lines import first_in_two_texts
from ....tracing.moved import influence_of
from ....tracing.pictures import levels, text_map
from ...leaks import Leak, LeakFinder, Trial

FEW = 8  # tokens of a long text that are changed alone, in a heavy model
MAP = 8  # tokens in the map of a leak, where it is as short


def explain(leak: Leak, proof: Proof) -> AssertionError:
    """Return the failure; its map is a note.

    Its first sentence says which position sees which token, and the line that
    lets it through, which the proof knows; the smallest case, the rounding
    and the way follow, each after a semicolon.
    """
    leak = smallest(leak)
    trial, row, variant = leak.trial, leak.row, leak.trial.variant
    base, changed = trial.base[row], trial.changed[row]
    time = trial.time
    differing = (base != changed).nonzero().flatten().tolist()
    token, last = differing[0], differing[-1]
    one = token == last
    what = f"token {token}" if one else f"the tokens from {token} on"
    case = f"token {token} changed from {base[token]} to {changed[token]}"
    if not one:
        case = f"tokens {token} to {last} drawn anew"
    if time <= SHORT:
        case += f" in the ids {' '.join(map(str, base.tolist()))}"
    line = None
    with suppress(Exception):  # a model may need what a mode takes away
        line = first_in_two_texts(
            variant.model,
            (
                partial(variant.scores, trial.base),
                partial(variant.scores, trial.changed),
            ),
            (len(trial.base), trial.time),
            leak.position + 1,
            floor_of(getattr(torch, leak.dtype)) * leak.noise / leak.size,
        )
    known = line is not None and not proof.in_chunks
    where = seen = f"first seen at {line}, " if known else ""
    parts = [case, f"rounding there is {leak.noise:.1g} ({leak.dtype})"]
    if proof.culprit is not None:
        where = f"{proof.culprit} lets {'it' if one else 'them'} through, "
        parts += [seen.rstrip(", ")] * known + [f"way: {proof.way}"]
        path, op = Path(proof.culprit.path), proof.culprit.op
        kind = op.rpartition("::")[2]  # quantized::linear_dynamic
        dynamic = kind.startswith("linear_") and "dynamic" in kind
        if dynamic or "torchao" in path.parts:  # it quantises activations
            parts = [
                "one scale of the activations is taken over all tokens of "
                "all rows: a scale for each token lets none through",
                *parts,
            ]
    text = (
        f"position {leak.position} sees {what}: {where}at length {time}, by "
        f"{leak.size:.2g}{variant.conditions}; {'; '.join(parts)}"
    )
    at = proof.culprit or (line.place if line else None)
    error = Leaked(
        text,
        at,
        position=leak.position,
        token=token,
        length=time,
        size=leak.size if math.isfinite(leak.size) else None,
        file=at.file if at else None,
        line=at.line if at else None,
    )
    if time <= 2 * SHORT:
        error.add_note(text_map(_map(variant, base)))
    return error


def smallest(leak: Leak) -> Leak:
    """Return the leak at the smallest length, from a single token."""
    trial = leak.trial
    subject = trial.variant.subject
    vocab, generator = subject.vocab_size, subject.generator()
    row = trial.base[leak.row]
    lengths = range(2, min(SHORT, trial.time - 1) + 1)
    for time in filter(subject.lengths.accepts, lengths):
        drawn = draw(vocab, 1, time, generator, repeats=False)[0]
        for base in (drawn, row[:time]):
            changed = others(base, vocab, generator)
            found = _of_one_token(trial.variant, base, changed, 1)
            if found is not None:
                return found
    changed, split = trial.changed[leak.row], trial.splits[leak.row]
    return _of_one_token(trial.variant, row, changed, split) or leak


def _of_one_token(
    variant: Variant,
    base: Int[Tensor, "time"],
    changed: Int[Tensor, "time"],
    first: int,
) -> Leak | None:
    """Return a leak from changing one token only, or None."""
    time = base.numel()
    splits = list(range(first, time))
    if variant.subject.heavy and time > SHORT:
        splits = splits[:FEW]
    rows = base.repeat(len(splits), 1)
    other = rows.clone()
    other[range(len(splits)), splits] = changed[splits]
    return LeakFinder().find(Trial(variant, rows, other, splits))


def _map(
    variant: Variant, ids: Int[Tensor, "time"]
) -> Float[Tensor, "length length"]:
    """Return the influence matrix, of eight tokens if they leak, too."""
    subject = variant.subject
    more = max(0, subject.lengths.fit(MAP) - ids.numel())
    rest = draw(subject.vocab_size, 1, more, subject.generator())[0]
    longer, short = (
        influence_of(variant, tokens)
        for tokens in (torch.cat([ids, rest]), ids)
    )
    return longer if levels(longer).triu(1).any() else short
