"""Find the smallest case of a leak, and describe it as a failure.

The smallest case is the shortest sequence in which one changed token still
moves an earlier score. The failure includes the position and a map of the
leak. The words after "way:" come from proof/explain.py. Three other files
write the messages for leaks that they find: compiled.py, causal_gradients.py
and guarding.py.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from ....proof.proof import Proof
from ....running.errors import Leaked, NotFinite
from ....running.operations import operations_through
from ....running.places import Place
from ....running.rounding import FirstNaN, floor_of
from ....running.tokens import SHORT, draw, others
from ....running.variant import Variant
from ....tracing.lines import Line, first_in_two_texts
from ....tracing.moved import influence_of
from ....tracing.pictures import levels, text_map
from ...leaks import Evidence, LeakFinder, Trial

TOKENS_CHANGED = 8  # most tokens of a heavy model's text to change one by one
MAP_TOKENS = 8  # most tokens in the map of a leak


@dataclass(frozen=True)
class Leak:
    """The facts of a failure: a position that sees later tokens."""

    position: int
    token: int  # the first changed token
    last: int  # the last changed token
    length: int  # tokens of the text
    ids: tuple[int, ...]  # tokens of the text
    changed: int  # the id that replaces the first changed token
    size: float  # the change of the score
    noise: float  # the rounding of the score
    dtype: str  # dtype of the scores
    case: str  # the call and the copy in words, for messages
    line: Line | None  # the first line at which the two texts differ
    in_chunks: bool  # whether the proof finds the leak only in chunks
    culprit: Place | None  # the line that should have stopped the token
    way: str  # the path of the token according to the proof
    forbidden_by: str = ""  # name of the declaration of visibility, if any
    fork: Place | None = None  # the line that chooses a path by tokens

    @property
    def one_token(self) -> bool:
        """Return whether a single token was changed."""
        return self.token == self.last

    @property
    def place(self) -> Place | None:
        """Return the line to correct, if it is known."""
        found = None if self.line is None else self.line.place
        return self.culprit or self.fork or found

    @property
    def one_scale(self) -> bool:
        """Return whether the line quantises all tokens with one scale."""
        if self.culprit is None:
            return False
        # without the namespace, as in quantized::linear_...
        kind = self.culprit.op.rpartition("::")[2]
        dynamic = kind.startswith("linear_") and "dynamic" in kind
        return dynamic or "torchao" in Path(self.culprit.path).parts


def failure_of(evidence: Evidence, proof: Proof) -> AssertionError:
    """Return the failure for the shortest leaking text, with a map as note."""
    crossing = evidence.trial.crossing  # taken before `smallest` drops it
    evidence = smallest(evidence)
    leak = facts_of(evidence, proof)
    if crossing is not None:
        leak = replace(leak, fork=crossing.fork)
    at = leak.place
    error = Leaked(
        sentence_of(leak),
        at,
        position=leak.position,
        token=leak.token,
        length=leak.length,
        size=leak.size if math.isfinite(leak.size) else None,
        file=at.file if at else None,
        line=at.line if at else None,
    )
    if leak.length <= 2 * SHORT:
        trial = evidence.trial
        error.add_note(_map(trial.variant, trial.base[evidence.row]))
    return error


def facts_of(evidence: Evidence, proof: Proof) -> Leak:
    """Return the facts of a leak, from its texts and from the proof."""
    trial, row = evidence.trial, evidence.row
    base, changed = trial.base[row], trial.changed[row]
    differing = (base != changed).nonzero().flatten().tolist()
    line = None
    with suppress(Exception):  # the model may not run under the recorder
        line = _first_line(evidence)
    return Leak(
        position=evidence.position,
        token=differing[0],
        last=differing[-1],
        length=trial.time,
        ids=tuple(base.tolist()),
        changed=int(changed[differing[0]]),
        size=evidence.size,
        noise=evidence.noise,
        dtype=evidence.dtype,
        case=trial.variant.conditions,
        line=line,
        in_chunks=proof.in_chunks,
        culprit=proof.culprit,
        way=proof.way,
        forbidden_by=proof.sees,
    )


def _first_line(evidence: Evidence) -> Line | None:
    """Return the first line at which the two texts of a leak differ."""
    trial, variant = evidence.trial, evidence.trial.variant
    if variant.subject.sees is not None:
        return None  # a declaration may let earlier positions see the token
    unit = evidence.noise / evidence.size
    return first_in_two_texts(
        variant.model,
        (
            partial(variant.scores, trial.base),
            partial(variant.scores, trial.changed),
        ),
        (len(trial.base), trial.time),
        evidence.position + 1,
        floor_of(getattr(torch, evidence.dtype)) * unit,
    )


def sentence_of(leak: Leak) -> str:
    """Return the sentences of a failure.

    The first clause has the position, the token, and the line that lets the
    token through, according to the proof. The smallest case, the rounding
    and the path follow, separated by semicolons.
    """
    what = f"the tokens from {leak.token} on"
    case = f"tokens {leak.token} to {leak.last} drawn again"
    if leak.one_token:
        what = f"token {leak.token}"
        old = leak.ids[leak.token]
        case = f"{what} changed from {old} to {leak.changed}"
    if leak.length <= SHORT:
        case += f" in the ids {' '.join(map(str, leak.ids))}"
    known = leak.line is not None and not leak.in_chunks
    seen = [f"first seen at {leak.line}"] * known
    parts = [case, f"rounding there is {leak.noise:.1g} ({leak.dtype})"]
    where = "".join(f"{words}, " for words in seen)
    if leak.fork is not None and leak.culprit is None:
        where = f"{leak.fork} lets later tokens choose the path, "
        parts += seen
    if leak.culprit is not None:
        them = "it" if leak.one_token else "them"
        where = f"{leak.culprit} lets {them} through, "
        parts += [*seen, f"way: {leak.way}"]
    if leak.one_scale:
        parts = [
            "one scale of the activations is taken over all tokens of "
            "all rows: a scale for each token lets none through",
            *parts,
        ]
    forbids = f", which {leak.forbidden_by} forbids"
    what += forbids * bool(leak.forbidden_by)
    return (
        f"position {leak.position} sees {what}: {where}at length "
        f"{leak.length}, by {leak.size:.2g}{leak.case}; {'; '.join(parts)}"
    )


def smallest(leak: Evidence) -> Evidence:
    """Search for the shortest text in which one changed token leaks."""
    trial = leak.trial
    subject = trial.variant.subject
    vocab, generator = subject.vocab_size, subject.generator()
    row = trial.base[leak.row]
    lengths = range(2, min(SHORT, trial.time - 1) + 1)
    if subject.heavy and subject.sees is not None:
        lengths = range(0)  # keep the text that proof/prover.py has chosen
    for time in filter(subject.lengths.accepts, lengths):
        drawn = draw(vocab, 1, time, generator, repeats=False)[0]
        for base in (drawn, row[:time]):
            changed = others(base, vocab, generator)
            first = 0 if subject.sees is not None else 1
            found = _of_one_token(trial.variant, base, changed, first)
            if found is not None:
                return found
    changed, split = trial.changed[leak.row], trial.splits[leak.row]
    if subject.sees is not None:
        split = 0
    return _of_one_token(trial.variant, row, changed, split) or leak


def _of_one_token(
    variant: Variant,
    base: Int[Tensor, "time"],
    changed: Int[Tensor, "time"],
    first: int,
) -> Evidence | None:
    """Return the leak that shows when one token is changed, or None."""
    time = base.numel()
    splits = list(range(first, time))
    if variant.subject.heavy and time > SHORT:
        splits = splits[:TOKENS_CHANGED]
    rows = base.repeat(len(splits), 1)
    other = rows.clone()
    other[range(len(splits)), splits] = changed[splits]
    return LeakFinder().find(Trial(variant, rows, other, splits))


def _map(variant: Variant, ids: Int[Tensor, "time"]) -> str:
    """Return the influence map of eight tokens, or of `ids` if none leaks."""
    subject = variant.subject
    if subject.sees is not None:
        relation = subject.sees.of(ids.unsqueeze(0))[0]
        return text_map(influence_of(variant, ids), relation)
    more = max(0, subject.lengths.fit(MAP_TOKENS) - ids.numel())
    rest = draw(subject.vocab_size, 1, more, subject.generator())[0]
    longer, short = (
        influence_of(variant, tokens)
        for tokens in (torch.cat([ids, rest]), ids)
    )
    return text_map(longer if levels(longer).triu(1).any() else short)


def not_finite(trial: Trial, found: str) -> NotFinite:
    """Return the failure for texts with NaN scores; name the NaN's line."""
    label = trial.label or trial.variant.case.mode
    with operations_through(FirstNaN()) as first, suppress(Exception):
        trial.variant.scores(trial.base)
    place = first.place
    where = f"; the first NaN is made at {place}" if place else ""
    return NotFinite(
        f"{found}, {label}, at length {trial.time}{where}; check_finite is "
        f"about this, and nothing can be said of the future",
        place,
    )
