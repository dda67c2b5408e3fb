"""Feeds a model piece by piece, with its cache, in the way that it has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import le
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelRaised
from ..model.building import KeptState
from ..model.calling import MASK, describe
from ..model.inputs import STATES
from ..model.sizes import padding_ids
from ..subject import Subject
from ..tokens import draw
from ..variant import Variant, in_double, larger, own, precise
from .conventions import Convention, Text, conventions, sizes_of

# How sure it is that a way to call a model is decoding: it is none, what is
# surely a cache cannot be used, it is used but wrongly, it is right.
NONE, UNUSED, WRONG, RIGHT = range(4)
NEAR = 1e-3  # of the spread of scores: right enough to choose a way


class Decoder:
    """Decodes with a model's cache, or by its full forward.

    Enlarged is whether a copy with larger weights is tried first.
    """

    convention: Any = None  # a Convention; None: no cache was found
    reason = ""  # why a likely way is none

    def __init__(self, subject: Subject, enlarged: bool = True):
        self.subject = subject
        masked = subject.caller.takes_mask  # a mask of padding
        makes: list[Callable[[], Variant | None]] = [
            lambda: precise(subject, masked=masked),
            lambda: own(subject),  # a cache may be of one precision
        ]
        doubles = [in_double(subject, m) for m in (False, masked)]
        if enlarged and doubles != [True, False]:
            makes.insert(0, lambda: larger(subject))  # attention may be 0
        best = NONE
        for make in makes:
            variant = make() if best < WRONG else None
            if variant is not None:
                best = self._choose(variant)

    def _choose(self, variant: Variant) -> int:
        """Choose the way that is right, or the likeliest of those wrong."""
        self.variant, self.convention, best = variant, None, NONE
        wrong = dict[str, Convention]()
        for way in self._ways(variant.model):
            grade = self._grade(way)
            if grade == WRONG:
                wrong[way.says] = way
            left_out = wrong.get(way.says.removesuffix(f" and {way.position}"))
            if grade == RIGHT and way.may_leave_out and left_out is not None:
                said = f", {way.position} left out; right where given"
                way = replace(left_out, says=left_out.says + said)
                self.convention, best = way, WRONG
                break
            if grade > best:
                self.convention, best = way, grade
            if grade == RIGHT:
                break
        return best

    def _ways(self, model: Any) -> Iterator[Convention]:
        """Decode with a model from now on; yield the ways that it offers."""
        self.model, self._state = model, None
        if isinstance(model, nn.Module):
            model.eval()
            self._state = KeptState(model)
        return conventions(self.subject, model, self.start_again)

    def bind(self, model: Any) -> None:
        """Decode with another copy of the model, in the way chosen."""
        says = self.convention.says
        self.convention = next(
            way for way in self._ways(model) if way.says == says
        )

    def start_again(self) -> None:
        """Put back what the model held before its first piece."""
        if self._state is not None:
            self._state.put_back(always=True)

    def _grade(self, way: Convention) -> int:
        """Return how sure it is that a way is decoding with a cache."""
        subject = self.subject
        time, rows = subject.lengths.fit(5), subject.fit_rows(2)
        tokens = self.draw(rows, time, subject.generator())
        end = max(time - 2, 1)
        other = tokens.clone()
        other[:, :end] = (tokens[:, :end] + 1) % subject.vocab_size
        if time == 1:
            return NONE
        flagged = any("cache" in flag for flag in way.flags)
        surely = UNUSED if way.strong or flagged else NONE
        after = []
        for ids in (tokens, other):
            try:
                text = Text(way, rows)
                text.feed(ids[:, :end])
            except ModelRaised as error:
                self.reason = self.reason or f"{way.says}: {error}"
                return NONE
            if way.cache is not None and text.cache is None:
                why = f"no {way.cache} comes with the scores"
                self.reason = self.reason or why
                return NONE
            first = sizes_of(text.cache)
            try:
                scores = self.scores(text, ids[:, end : end + 1])
            except AssertionError as error:
                self.reason = self.reason or f"{way.says}: {error}"
                return surely
            if way.cache in STATES and not _grown(first, sizes_of(text.cache)):
                self.reason = f"{way.cache} is not taken back as it came"
                return NONE
            after.append(scores)
        if after[0].equal(after[1]):
            return surely if text.returned or way.cache is None else NONE
        self.convention, kept = way, self.convention
        try:
            full = self.full(tokens)
            decoded = self.in_pieces(tokens, [end, *[1] * (time - end)])
        except AssertionError:
            return WRONG
        finally:
            self.convention = kept
        gap = (full - decoded)[:, self.scored].abs().max()
        return RIGHT if gap <= NEAR * full.std() else WRONG

    def full(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores of the full forward."""
        if not self.convention.apart:
            self.start_again()  # without what it holds
        return self.variant.scores(tokens, mask=mask)

    def scores(self, text: Text, piece: Tensor, **mask: Tensor) -> Tensor:
        """Return the scores of a piece: all, or its last position's."""
        subject, (rows, size) = self.subject, piece.shape
        subject.budget.call()
        answer = text.feed(piece, **mask)
        for time in dict.fromkeys((size, text.seen.size(1), 1)):
            found = subject.find(answer, rows, time)
            if found is not None:
                break
        else:
            wanted = (rows, size, subject.vocab_size)
            raise AssertionError(
                f"with a cache ({text.convention.says}) ids of shape "
                f"{(rows, size)} give {describe(answer)} where scores of "
                f"shape {wanted} should be"
            )
        scores = subject.without_hidden(found[:, -size:])
        if subject.caller.log_probs:
            scores = scores.log_softmax(-1)
        return scores

    def in_pieces(
        self, tokens: Tensor, pieces: list[int], mask: Tensor | None = None
    ) -> Tensor:
        """Return the scores of tokens that are fed piece by piece.

        Where a piece has those of its last position only, others are 0.
        """
        text = Text(self.convention, tokens.size(0))
        self.scored = tokens.new_zeros(tokens.size(1), dtype=torch.bool)
        parts: list[Tensor] = []
        for piece in tokens.split(pieces, dim=1):
            end = text.seen.size(1) + piece.size(1)
            seen = {} if mask is None else {MASK: mask[:, :end]}
            if parts and self.convention.cache in STATES:
                seen = {}
            scores = self.scores(text, piece, **seen)
            missing = piece.size(1) - scores.size(1)
            if missing and parts and bool(self.scored[:1].all()):
                raise ModelRaised(
                    f"of a piece of {piece.size(1)} tokens behind the first "
                    f"{scores.size(1)} is answered"
                )
            self.scored[end - scores.size(1) : end] = True
            parts.append(nn.functional.pad(scores, (0, 0, missing, 0)))
        return torch.cat(parts, dim=1)

    def draw(
        self, batch: int, time: int, generator: torch.Generator
    ) -> Tensor:
        """Draw ids, none of them padding: that shifts some positions."""
        vocab = self.subject.vocab_size
        tokens = draw(vocab, batch, time, generator)
        for padding in padding_ids(self.model):
            tokens[tokens == padding] = (padding + 1) % vocab
        return tokens.to(self.subject.device)


def _grown(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether no tensor of a cache, nor an axis of one, has lost a part."""
    same = len(before) == len(after)
    if same and isinstance(before, list):
        return all(map(_grown, before, after))
    return same and all(map(le, before, after))
