"""The smallest case of a leak, and the failure that it becomes.

It is the shortest sequence in which changing one token still moves an earlier
score, told with its place and its map.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
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

TOKENS_CHANGED = 8  # of a heavy model's long text, one at a time
MAP_TOKENS = 8  # in the map of a leak, where its text is as short


@dataclass(frozen=True)
class Leak:
    """The facts of a failure: the position that sees tokens after it."""

    position: int
    token: int  # the first that was changed
    last: int  # the last one
    length: int  # tokens of the text
    ids: tuple[int, ...]  # of the text
    changed: int  # the new id of the first token
    size: float  # by how much the score differs
    noise: float  # the rounding there
    dtype: str  # of the scores
    case: str  # the call and the copy, as messages name them
    line: Line | None  # the first at which the two texts differ
    in_chunks: bool  # the proof sees it in chunks only: the line may be later
    culprit: Place | None  # the line that should have stopped the token
    way: str  # the token's way, as the proof tells it
    forbidden_by: str = ""  # the declaration of who may see whom

    @property
    def one_token(self) -> bool:
        """Whether a single token was changed."""
        return self.token == self.last

    @property
    def place(self) -> Place | None:
        """The line to mend, as far as it is known."""
        found = None if self.line is None else self.line.place
        return self.culprit or found

    @property
    def one_scale(self) -> bool:
        """Whether the line quantises the activations of all tokens at once."""
        if self.culprit is None:
            return False
        kind = self.culprit.op.rpartition("::")[2]  # of quantized::linear_...
        dynamic = kind.startswith("linear_") and "dynamic" in kind
        return dynamic or "torchao" in Path(self.culprit.path).parts


def explain(evidence: Evidence, proof: Proof) -> AssertionError:
    """Return the failure at the smallest case; its map is a note."""
    evidence = smallest(evidence)
    leak = facts_of(evidence, proof)
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
    """Return the facts of a leak: those of its texts and of the proof."""
    trial, row = evidence.trial, evidence.row
    base, changed = trial.base[row], trial.changed[row]
    differing = (base != changed).nonzero().flatten().tolist()
    line = None
    with suppress(Exception):  # a model may need what a mode takes away
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
    """Return the first line at which the position's two texts differ."""
    trial, variant = evidence.trial, evidence.trial.variant
    if variant.subject.sees is not None:
        return None  # other positions may see the token
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
    """Return the words of a failure.

    The first clause says which position sees which token, and the line that
    lets it through, which the proof knows; the smallest case, the rounding
    and the way follow, each after a semicolon.
    """
    what = f"the tokens from {leak.token} on"
    case = f"tokens {leak.token} to {leak.last} drawn anew"
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
    """Return a leak from changing one token only, or None."""
    time = base.numel()
    splits = list(range(first, time))
    if variant.subject.heavy and time > SHORT:
        splits = splits[:TOKENS_CHANGED]
    rows = base.repeat(len(splits), 1)
    other = rows.clone()
    other[range(len(splits)), splits] = changed[splits]
    return LeakFinder().find(Trial(variant, rows, other, splits))


def _map(variant: Variant, ids: Int[Tensor, "time"]) -> str:
    """Return the influence matrix, of eight tokens if they leak as well."""
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
    """Return the failure of a trial whose scores are NaN, with its line."""
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
