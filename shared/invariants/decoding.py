"""Feeds a model piece by piece, with its cache, and compares."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from .budget import Budget
from .conventions import STATES, Convention, Text, conventions, sizes_of
from .errors import ModelRaised
from .explain import calls_at, first_of
from .larger_weights import larger
from .meeting.building import KeptState
from .meeting.calling import MASK
from .meeting.reading import describe
from .meeting.sizes import has_position_table, padding_ids
from .rounding import floor, gaps, real_gap
from .subject import Subject
from .tokens import draw
from .variant import Variant, in_double, own, precise

# How sure it is that a way to call a model is decoding: it is none, what is
# surely a cache cannot be used, it is used but wrongly, it is right.
NONE, UNUSED, WRONG, RIGHT = range(4)
NEAR = 1e-3  # of the spread of scores: right enough to choose a way


class Decoder:
    """Decodes with a model's cache, and compares with the full forward."""

    told = ""  # what the report should say
    convention: Convention | None = None  # None: no cache was found
    reason = ""  # why a likely way is none

    def __init__(self, subject: Subject, budget: Budget):
        self.subject, self.budget = subject, budget
        masked = subject.caller.takes_mask  # a mask of padding
        makes: list[Callable[[], Variant | None]] = [
            lambda: precise(subject, budget, masked=masked),
            lambda: own(subject, budget),  # a cache may be of one precision
        ]
        doubles = [in_double(subject, budget, m) for m in (False, masked)]
        if doubles != [True, False]:  # a fresh model's attention may be 0
            makes.insert(0, lambda: larger(subject, budget))
        best = NONE
        for make in makes:
            variant = make() if best < WRONG else None
            if variant is not None:
                best = max(best, self._choose(variant, best))

    def _choose(self, variant: Variant, best: int) -> int:
        """Choose the way that is right, or the likeliest of those wrong."""
        self.variant, self.model = variant, variant.model
        self._state = None
        if isinstance(self.model, nn.Module):
            self.model.eval()
            self._state = KeptState(self.model)
        for way in conventions(self.subject, self.model, self.start_again):
            grade = self._grade(way)
            if grade > best:
                self.convention, best = way, grade
            if grade == RIGHT:
                break
        return best

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
        asked = any("cache" in flag for flag in way.flags)
        surely = UNUSED if way.strong or asked else NONE
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
            second = sizes_of(text.cache)
            same = len(first) == len(second) and all(
                map(_is_grown, first, second)
            )
            if way.cache in STATES and not same:
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
        gap = (full - decoded)[:, self._scored].abs().max()
        return RIGHT if gap <= NEAR * full.std() else WRONG

    def full(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores of the full forward."""
        if self.convention is not None and not self.convention.apart:
            self.start_again()  # without what it holds
        return self.variant.scores(tokens, mask=mask)

    def scores(self, text: Text, piece: Tensor, **mask: Tensor) -> Tensor:
        """Return the scores of a piece: all, or its last position's."""
        subject, (rows, size) = self.subject, piece.shape
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
        if subject.caller.method is not None:
            scores = scores.log_softmax(-1)
        self.budget.charge(scores)
        return scores

    def in_pieces(
        self, tokens: Tensor, pieces: list[int], mask: Tensor | None = None
    ) -> Tensor:
        """Return the scores of tokens that are fed piece by piece.

        Where a piece has those of its last position only, others are 0.
        """
        assert self.convention is not None
        text = Text(self.convention, tokens.size(0))
        self._scored = torch.zeros(tokens.size(1), dtype=torch.bool)
        parts: list[Tensor] = []
        for piece in tokens.split(pieces, dim=1):
            end = text.seen.size(1) + piece.size(1)
            seen = {} if mask is None else {MASK: mask[:, :end]}
            if parts and self.convention.cache in STATES:
                seen = {}
            scores = self.scores(text, piece, **seen)
            missing = piece.size(1) - scores.size(1)
            self._scored[end - scores.size(1) : end] = True
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

    def require_reset(self, time: int, generator: torch.Generator) -> None:
        """Require that a text in the model's own cache leaves nothing."""
        assert self.convention is not None
        if self.convention.apart:
            return
        self.start_again()
        tokens, said = self.draw(1, time, generator), ""
        first = self.in_pieces(tokens, [1] * time)
        try:
            second = self.in_pieces(tokens, [1] * time)
            size = float(gaps(first, second).max())
            if size > floor(first):
                said = f"the same tokens again differ by {size:.2g}"
        except ModelRaised as error:
            said = str(error)
        if said:
            raise AssertionError(
                f"with a cache ({self.convention.says}), {time} tokens stay "
                f"for the text after them: {said}"
            )

    def compare(self, tokens: Tensor, splits: list[list[int]]) -> None:
        """Require that tokens fed in pieces have the scores of the whole."""
        assert self.convention is not None
        full = self.full(tokens)
        for pieces in splits:
            several = max(pieces[1:], default=1) > 1
            if several and (self.told or self.convention.one_at_a_time):
                continue
            try:
                self.require(tokens, pieces, full=full)
            except ModelRaised as error:
                if not several:
                    raise
                self.told = f"; goes on with one token at a time only: {error}"

    def compare_two_texts(self, time: int, generator: torch.Generator) -> None:
        """Require that a text leaves another one alone."""
        assert self.convention is not None
        rows = self.subject.fit_rows(2)
        pair = [self.draw(rows, time, generator) for _ in range(2)]
        if self.convention.apart:
            turns, both = partial(self.in_turns, pair), torch.cat(pair)
            self.require(both, [1] * time, "two in turns, ", decode=turns)
        pair[1][0] = pair[0][0]
        pieces = _prompt_first(time)

        def second() -> Tensor:
            return [self.in_pieces(tokens, pieces) for tokens in pair][1]

        how = "after another text with the same first row, "
        self.require(pair[1], pieces, how, decode=second)

    def in_turns(self, pair: list[Tensor]) -> Tensor:
        """Return the scores of two texts, each a token at a time."""
        assert self.convention is not None
        texts = [Text(self.convention, len(tokens)) for tokens in pair]
        columns = zip(*(tokens.split(1, 1) for tokens in pair), strict=True)
        self._scored = torch.ones(pair[0].size(1), dtype=torch.bool)
        parts = [torch.cat([*map(self.scores, texts, c)]) for c in columns]
        return torch.cat(parts, dim=1)

    def compare_padded(self, time: int, generator: torch.Generator) -> None:
        """Require the same of rows of unlike length, padded on the left."""
        if (
            self.convention is None
            or not self.convention.takes_mask
            or time < 4
        ):
            return
        tokens = self.draw(self.subject.fit_rows(3), time, generator)
        mask = torch.ones_like(tokens).triu()  # a column more in each row
        how = "rows of unlike length padded on the left, "
        try:
            self.require(tokens, _prompt_first(time), how, mask)
        except ModelRaised as error:  # its mask may mean something else
            self.told += f"; not with a mask: {error}"

    def require_an_end(self, tokens: Tensor) -> None:
        """Require that the last token is refused, if it is without a cache."""
        subject, end = self.subject, tokens.size(1) - 1
        if (
            subject.limit is None
            or subject.limit.value != end
            or not has_position_table(self.model, end, subject.vocab_size)
            or tokens.device.type != "cpu"
        ):
            return
        with suppress(ModelRaised):
            self.full(tokens)
            return  # the matter of check_length_limit
        with suppress(ModelRaised):
            self.in_pieces(tokens, [end, 1])
            raise AssertionError(
                f"with a cache token {end + 1} is answered, which the full "
                f"forward refuses: the model declares {subject.limit}"
            )

    def require(
        self,
        tokens: Tensor,
        pieces: list[int],
        how: str = "",
        mask: Tensor | None = None,
        full: Tensor | None = None,
        decode: Callable[[], Tensor] | None = None,
    ) -> None:
        """Require that tokens are decoded to the scores of the full forward.

        Full holds the scores of the full forward, if known. Positions that
        the mask hides are not compared.

        Raises:
            AssertionError: with the first position that differs.
        """
        decode = decode or partial(self.in_pieces, tokens, pieces, mask)
        assert self.convention is not None
        forward = partial(self.full, tokens, mask)
        full = forward() if full is None else full
        says = f"with a cache ({self.convention.says}), "
        known = full, decode()
        shown = self._scored.expand(tokens.shape)
        if mask is not None:
            shown = shown & mask.bool().cpu()
        gap = earlier = real_gap(self.model, forward, decode, known, shown)
        if gap is None:
            return
        while earlier is not None:  # the largest of those before
            gap = earlier
            shown = shown & (torch.arange(shown.size(1)) < gap.at[1])
            earlier = real_gap(self.model, forward, decode, known, shown)
        (row, position), (batch, time) = gap.at, tokens.shape
        count = sum(end <= position for end in accumulate(pieces))
        start, size = sum(pieces[:count]), pieces[count]
        fed = " + ".join(map(str, pieces[:6])) + " + ..." * (len(pieces) > 6)
        where = "" if how else self._where(tokens, pieces, count, *gap.at)
        raise AssertionError(
            f"{says}{how}fed as {fed} tokens, "
            f"position {position} of {time} in row {row} of {batch}, in the "
            f"piece of {size} after {start}, differs from the full forward "
            f"by {gap.size:.2g}{where}"
        )

    def _where(
        self,
        tokens: Tensor,
        pieces: list[int],
        count: int,
        row: int,
        position: int,
    ) -> str:
        """Return the module where the two first differ, and its line."""
        if not isinstance(self.model, nn.Module) or self.convention is None:
            return ""
        rows, time = tokens.shape
        at = slice(position, position + 1)
        left = calls_at(
            self.model, partial(self.full, tokens), (rows, time), row, at
        )
        text = Text(self.convention, rows)
        *before, last = tokens.split(pieces, 1)[: count + 1]
        for piece in before:
            text.feed(piece)
        position -= sum(pieces[:count])
        at = slice(position, position + 1)
        feed = partial(self.scores, text, last)
        right = calls_at(self.model, feed, (rows, last.size(1)), row, at)
        name = first_of(left, right, 1e-6)
        if name is None:
            return ""
        return f"; first in {_place(self.model, name)}"


def _place(model: nn.Module, name: str) -> str:
    """Return a module's path and class, and the line of the user's class."""
    module = model.get_submodule(name)
    shown = f"{name} ({type(module).__name__})" if name else "the model itself"
    while type(module).__module__.startswith("torch.") and name:
        name = name.rpartition(".")[0]  # PyTorch's own: where it is used
        module = model.get_submodule(name)
    code = inspect.unwrap(type(module).forward).__code__
    return f"{shown}, {Path(code.co_filename).name}:{code.co_firstlineno}"


def _is_grown(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a tensor of a cache has lost nothing."""
    return len(before) == len(after) and all(
        a <= b for a, b in zip(before, after, strict=True)
    )


def _prompt_first(time: int) -> list[int]:
    """Return pieces of which all but the first are one token."""
    first = time // 2 + 1
    return [first, *[1] * (time - first)]
