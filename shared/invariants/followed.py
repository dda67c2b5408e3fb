"""Prove that no token sees a later one in decoding with a cache.

Only here does a proof pass the model its cache arguments (such as
`past_key_values`). If decoding cannot be proved, the proof lists these
arguments as never given.
"""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from ..proof.proof import Proof
from ..proof.prover import prove
from ..proof.runs import runs_of
from ..running.decoding import Decoder
from ..running.errors import ModelRaised
from ..running.model.building import Model
from ..running.model.inputs import CACHES
from ..running.subject import Subject
from ..running.ways import BETWEEN, Case, Tokens

HOW = "in two pieces with a cache"


class InPieces:
    """Decodes texts in two pieces with a cache, and returns their scores."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.bound = decoder, decoder.model
        self.several = True  # whether the second piece has several tokens
        tokens = decoder.subject.draw(1, 5)
        try:
            self(decoder.model, tokens.to(decoder.subject.device))
        except ModelRaised:
            self.several = False

    def __call__(
        self, model: Model, tokens: Tokens
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores; 0 at positions that decoding does not score."""
        if self.bound is not model:
            self.decoder.bind(model)
            self.bound = model
        time = tokens.size(1)
        last = time // 2 if self.several else min(1, time - 1)
        return self.decoder.in_pieces(
            tokens, [n for n in (time - last, last) if n]
        )


def follow_caches(subject: Subject, proof: Proof) -> None:
    """Add decoding to a proof, and list arguments that it never gives."""
    if subject.sees is not None:
        return  # a declaration of visibility covers whole texts only
    caller = subject.caller
    names = [*caller.arguments, *caller.own_arguments]
    kept = [n for n in names if n in CACHES and n not in caller.never]
    if proof.holds and (kept or subject.make_cache is not None):
        given = {*_given(subject, proof)}
        never = [n for n in proof.never_given if n not in given]
        proof.never_given = [*never, *(n for n in kept if n not in given)]


def _given(subject: Subject, proof: Proof) -> Iterator[str]:
    """Yield the arguments that decoding gives, if decoding is proved."""
    try:
        decoder = Decoder(subject, enlarged=False)
        if decoder.convention is None:
            return
        case = Case(HOW, pieces=InPieces(decoder))
    except (AssertionError, ModelRaised):
        return
    found = prove(runs_of(subject, lengths=subject.fit(*BETWEEN)), (case,))
    subject.proofs[proof.order] = proof  # put back after proving the decoding
    if not found.holds or {*found.conditions} - {*proof.conditions}:
        return
    more = [a for a in found.assumptions if a not in proof.assumptions]
    proof.assumptions += more
    proof.modes.append(HOW)
    proof.cases += found.cases
    way = decoder.convention
    yield from (n for n in (way.cache, way.position, *way.flags) if n)
