"""Decode with a model's cache: find the convention, and feed pieces."""

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import le
from typing import Any

import torch
from torch import Tensor, nn

from .conventions import Convention, Text, Way, conventions, sizes_of
from .errors import ModelRaised
from .model.calling import MASK, describe
from .model.inputs import REFUSALS, STATES
from .model.kept_state import KeptState
from .model.sizes import padding_ids
from .subject import Subject
from .tokens import draw
from .tolerances import SPREAD_OF_A_RIGHT_WAY
from .variant import Variant, in_double, larger, own, precise

# Grades of a convention. NONE: the model does not decode by it. UNUSED:
# nothing shows that the cache is used. WRONG: it is used, but scores are
# wrong.
NONE, UNUSED, WRONG, RIGHT = range(4)


class Decoder:
    """Decodes with a model's cache, by the convention that fits it best.

    A convention is a way to pass a text to the model piece by piece. Several
    are tried on a copy of the model and graded; the best one is chosen, and
    `bind` applies it to another copy. To add a convention, yield it in
    `conventions`. Pieces are cut to lengths that the model accepts.
    `tracing/pieces.py` compares the scores with uncached ones.

    Args:
        subject: the model.
        enlarged: whether a copy with larger weights is tried first.
    """

    convention: Any = None  # a Convention; None if no cache was found
    reason = ""  # why a likely convention failed
    most: int | None = None  # most tokens in one piece; None: no limit
    then_one = False  # whether only single tokens may follow such a piece
    one_by_one = False  # whether pieces after the first must be single tokens

    def __init__(self, subject: Subject, enlarged: bool = True):
        self.subject = subject = subject.with_room()
        masked = subject.caller.takes_mask  # whether calls take a padding mask
        makes: list[Callable[[], Variant | None]] = [
            lambda: precise(subject, masked=masked),
            lambda: own(subject),  # in its own dtype
        ]
        doubles = [in_double(subject, m) for m in (False, masked)]
        if enlarged and doubles != [True, False]:
            # fresh weights may be 0, which would hide a cache's use
            makes.insert(0, lambda: larger(subject))
        best = NONE
        for make in makes:
            if best < WRONG and (variant := make()) is not None:
                best = self._choose(variant)

    def _choose(self, variant: Variant) -> int:
        """Choose the convention with right scores, or the one graded best."""
        self.variant, self.convention, best = variant, None, NONE
        wrong = dict[Way, Convention]()
        for way in self._ways(variant.model):
            grade = self.grade(way)
            if grade == WRONG:
                wrong[way.way] = way
            left_out = wrong.get(way.way.without_position())
            may_count = way.position in way.optional
            if grade == RIGHT and may_count and left_out is not None:
                said = replace(left_out.way, omitted=way.position)
                self.convention = replace(left_out, way=said)
                best = WRONG
                break
            if grade > best:
                self.convention, best = way, grade
            if grade == RIGHT:
                break
        return best

    def _ways(self, model: Any) -> Iterator[Convention]:
        """Use this copy of the model; yield the conventions that it offers."""
        self.model, self._state = model, None
        if isinstance(model, nn.Module):
            model.eval()
            self._state = KeptState(model)
        return conventions(self.subject, model, self.start_again)

    def bind(self, model: Any) -> None:
        """Decode with another copy of the model, by the chosen convention."""
        chosen = self.convention.way
        offered = self._ways(model)
        found = next(each for each in offered if each.way == chosen)
        self.convention = replace(found, way=chosen)  # `chosen` has `omitted`

    def start_again(self) -> None:
        """Restore the state that the model had before its first piece."""
        if self._state is not None:
            self._state.put_back(always=True)

    def grade(self, way: Convention) -> int:
        """Try a convention, and return its grade (NONE to RIGHT)."""
        subject = self.subject
        time, rows = subject.lengths.fit(5), subject.fit_rows(2)
        tokens = self.draw(rows, time, subject.generator())
        end = max(time - 2, 1)
        other = tokens.clone()
        other[:, :end] = (tokens[:, :end] + 1) % subject.vocab_size
        if time == 1:
            return NONE
        self.most, self.then_one = None, False
        strong = way.strong or any("cache" in flag for flag in way.flags)
        surely = UNUSED if strong else NONE
        by_one = way.strong or way.position is not None
        after = []
        for ids in (tokens, other):
            try:
                text = self._begun(way, ids[:, :end], by_one)
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
        return RIGHT if gap <= SPREAD_OF_A_RIGHT_WAY * full.std() else WRONG

    def _begun(self, way: Convention, ids: Tensor, by_one: bool) -> Text:
        """Begin a text by feeding these ids, and return the text.

        `by_one`: whether to feed the ids one by one if they are refused.
        """
        try:
            text = Text(way, len(ids))
            text.feed(ids)
        except ModelRaised as error:
            if not by_one:
                raise
            text = Text(way, len(ids))
            try:
                for piece in ids.split(1, 1):
                    text.feed(piece)
            except ModelRaised:
                raise error from error.__cause__
            self.most = 1
        return text

    def full(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores of a forward pass over whole texts, uncached."""
        if not self.convention.apart:
            self.start_again()  # discard the cache left in the model
        return self.variant.scores(tokens, mask=mask)

    def scores(self, text: Text, piece: Tensor, **mask: Tensor) -> Tensor:
        """Feed a piece, and return scores at its positions (or its last)."""
        subject, (rows, size) = self.subject, piece.shape
        subject.budget.call()
        answer = text.feed(piece, **mask)
        for time in dict.fromkeys((size, text.seen.size(1), 1)):
            found = subject.reader.find(answer, rows, time)
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

        If the model scores only a piece's last position, other scores are 0.
        """
        try:
            return self._in_pieces(tokens, self.cut(pieces), mask)
        except ModelRaised as error:
            if not self._shorter(error, pieces):
                raise
            return self.in_pieces(tokens, pieces, mask)

    def _shorter(self, error: ModelRaised, pieces: list[int]) -> bool:
        """Limit the sizes of pieces, and return whether one was too long."""
        cut = self.cut(pieces)
        longest, later = max(cut), max(cut[1:], default=1)
        if longest == 1 or not isinstance(error.__cause__, REFUSALS):
            return False
        if not self.takes(longest) and self.takes(1):
            count = range(1, longest)
            self.most = bisect(count, False, key=lambda n: not self.takes(n))
            return True
        if later > max(pieces[1:], default=1):  # the cut made one longer
            self.then_one = True
            return True
        return False

    @property
    def goes_on_by_one(self) -> bool:
        """Return whether each piece after the first must be a single token."""
        return self.one_by_one or self.convention.whole

    def cut(self, pieces: list[int]) -> list[int]:
        """Split the sizes of pieces that are too long for the model."""
        if self.most is None:
            return pieces
        later = 1 if self.then_one or self.goes_on_by_one else self.most
        found = list[int]()
        for size in pieces:
            while size:
                found.append(min(size, later if found else self.most))
                size -= found[-1]
        return found

    def takes(self, size: int) -> bool:
        """Return whether a text may begin with a piece of this many tokens."""
        ids = self.draw(1, size, self.subject.generator())
        try:
            Text(self.convention, 1).feed(ids)
        except ModelRaised:
            return False
        return True

    def _in_pieces(
        self, tokens: Tensor, pieces: list[int], mask: Tensor | None
    ) -> Tensor:
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
                    f"of a piece of {piece.size(1)} tokens after the first "
                    f"{scores.size(1)} is answered"
                )
            self.scored[end - scores.size(1) : end] = True
            parts.append(nn.functional.pad(scores, (0, 0, missing, 0)))
        return torch.cat(parts, dim=1)

    def draw(
        self, batch: int, time: int, generator: torch.Generator
    ) -> Tensor:
        """Draw ids other than padding, because padding shifts positions."""
        vocab = self.subject.vocab_size
        tokens = draw(vocab, batch, time, generator)
        for padding in padding_ids(self.model):
            tokens[tokens == padding] = (padding + 1) % vocab
        return tokens.to(self.subject.device)


def _grown(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Return whether no axis of the tensors in a cache got shorter."""
    same = len(before) == len(after)
    if same and isinstance(before, list):
        return all(map(_grown, before, after))
    return same and all(map(le, before, after))
