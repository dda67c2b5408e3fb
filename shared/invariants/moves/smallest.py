"""The failure that a leak becomes: its smallest case, its place, its map.

The smallest case is the shortest sequence in which changing one token still
moves an earlier score.
"""

import math
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..dependence.proof import Proof
from ..errors import Leaked
from ..lines import first_in_two_texts
from ..places import Place
from ..rounding import floor_of
from ..tokens import SHORT, draw, others
from ..variant import Variant
from .leaks import Leak, LeakFinder, Trial
from .moved import influence_of
from .pictures import levels, text_map

MAP = 8  # tokens in the map of a leak, where it is as short
FEW = 8  # tokens of a long text that are changed alone, in a heavy model


def explain(leak: Leak, proof: Proof) -> AssertionError:
    """Return the failure, in one sentence; its map is a note.

    The proof names the lines that let a later token through.
    """
    variant = leak.trial.variant
    with variant.subject.budget.overtime():
        return _explained(smallest(leak), proof)


def _explained(leak: Leak, proof: Proof) -> AssertionError:
    trial, row, variant = leak.trial, leak.row, leak.trial.variant
    base, changed = trial.base[row], trial.changed[row]
    time = trial.time
    differing = (base != changed).nonzero().flatten().tolist()
    token, last = differing[0], differing[-1]
    what = (
        f"sees token {token}: at length {time}, changing token {token} from "
        f"{int(base[token])} to {int(changed[token])}"
    )
    if token != last:
        what = (
            f"sees the tokens from {token} on: at length {time}, redrawing "
            f"tokens {token} to {last}"
        )
    text = (
        f"position {leak.position} {what} moves the scores of position "
        f"{leak.position} by {leak.size:.2g} ({leak.dtype}"
        f"{variant.conditions}; rounding there is {leak.noise:.1g})"
    )
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
        text += f"; first seen at {line}" if line is not None else ""
    if proof.culprit is not None:
        way = f" (way: {proof.way})" if proof.way else ""
        text += f"; let through at {proof.culprit}{way}"
        if _shares_a_scale(proof.culprit):
            text += (
                ": one scale of the activations is taken over all tokens of "
                "all rows; a scale for each token lets none through"
            )
    if time <= SHORT:
        text += f"; the input ids were {' '.join(map(str, base.tolist()))}"
    at = proof.culprit or (line and line.place)
    error = Leaked(
        text,
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


def _shares_a_scale(place: Place) -> bool:
    """Whether a line quantises activations, as far as its name says."""
    dynamic = place.op.startswith("linear_") and "dynamic" in place.op
    return dynamic or "torchao" in Path(place.path).parts


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
    for i, split in enumerate(splits):
        other[i, split] = changed[split]
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
