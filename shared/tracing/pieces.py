"""Feeds a model piece by piece, with its cache, against the full forward."""

import inspect
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import le
from typing import Any

import torch
from torch import Tensor, nn

from ..running.context import during, seed_all
from ..running.conventions import (
    POSITIONS,
    Convention,
    Text,
    Way,
    conventions,
    sizes_of,
)
from ..running.errors import FailureAt, ModelRaised, SkipCheck, sentence
from ..running.model.calling import MASK, describe, token_argument
from ..running.model.inputs import CACHED, FLAG, REFUSALS, STATES
from ..running.model.kept_state import KeptState
from ..running.model.sizes import has_position_table, padding_ids
from ..running.rounding import Gap, floor, gaps, real_gap
from ..running.subject import Subject
from ..running.tokens import draw
from ..running.variant import (
    CopyFailed,
    Variant,
    both,
    copy_for,
    in_double,
    larger,
    own,
    precise,
)
from ..running.ways import HALF
from .lines import Line, first_in_last_piece

# How sure it is that a way to call a model is decoding: it is none, what is
# surely a cache cannot be used, it is used but wrongly, it is right.
NONE, UNUSED, WRONG, RIGHT = range(4)
OF_DTYPES = re.compile(r"dtype|[Ff]loat|Half")  # what torch says of them
NEAR = 1e-3  # of the spread of scores: right enough to choose a way


class Decoder:
    """Decodes with a model's cache, and compares with the full forward.

    Enlarged is whether a copy with larger weights is tried first.
    """

    convention: Any = None  # a Convention; None: no cache was found
    reason = ""  # why a likely way is none
    note = ""  # for the report
    most: int | None = None  # tokens of a piece, where it refuses more
    then_one = False  # whether it takes one after such a piece
    stepped = 0  # tokens of the longest text that was fed one by one

    def __init__(self, subject: Subject, enlarged: bool = True):
        self.subject = subject = subject.with_room()
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
            if best < WRONG and (variant := make()) is not None:
                best = self._choose(variant)

    def _choose(self, variant: Variant) -> int:
        """Choose the way that is right, or the likeliest of those wrong."""
        self.variant, self.convention, best = variant, None, NONE
        wrong = dict[Way, Convention]()
        for way in self._ways(variant.model):
            grade = self._grade(way)
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
        """Decode with a model from now on; yield the ways that it offers."""
        self.model, self._state = model, None
        if isinstance(model, nn.Module):
            model.eval()
            self._state = KeptState(model)
        return conventions(self.subject, model, self.start_again)

    def bind(self, model: Any) -> None:
        """Decode with another copy of the model, in the way chosen."""
        chosen = self.convention.way
        offered = self._ways(model)
        found = next(each for each in offered if each.way == chosen)
        self.convention = replace(found, way=chosen)  # with what it omits

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
        strong = way.strong or any("cache" in flag for flag in way.flags)
        surely = UNUSED if strong else NONE
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

        Where a piece has those of its last position only, others are 0.
        """
        try:
            return self._in_pieces(tokens, self.cut(pieces), mask)
        except ModelRaised as error:
            if not self._shorter(error, pieces):
                raise
            return self.in_pieces(tokens, pieces, mask)

    def _shorter(self, error: ModelRaised, pieces: list[int]) -> bool:
        """Whether pieces were refused for their length, and are cut now."""
        cut = self.cut(pieces)
        longest, later = max(cut), max(cut[1:], default=1)
        if longest == 1 or not isinstance(error.__cause__, REFUSALS):
            return False
        if not self.takes(longest) and self.takes(1):
            count = range(1, longest)
            self.most = bisect(count, False, key=lambda n: not self.takes(n))
            return True
        if later > max(pieces[1:], default=1):  # since a long one was cut
            self.then_one = True
            return True
        return False

    def cut(self, pieces: list[int]) -> list[int]:
        """Return pieces no longer than the model takes them."""
        if self.most is None:
            return pieces
        one = self.then_one or self.note or self.convention.whole
        later = 1 if one else self.most
        found = list[int]()
        for size in pieces:
            while size:
                found.append(min(size, later if found else self.most))
                size -= found[-1]
        return found

    def takes(self, size: int) -> bool:
        """Whether a text may begin with a piece of so many tokens."""
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

    # --- Decoding with a cache equals the full forward -----------------------

    def require_reset(self, time: int, generator: torch.Generator) -> None:
        """Require that a text in the model's own cache leaves nothing."""
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

    def require_plain(self, time: int, generator: torch.Generator) -> None:
        """Require that a plain pass is the same after decoding as before."""
        if self.subject.keeps_state:
            return
        tokens, other = self.draw(2, time, generator).split(1)
        before = self.full(tokens)
        self.in_pieces(other, [1] * time)
        with suppress(ModelRaised):  # it may refuse one
            size = float(gaps(self.variant.scores(tokens), before).max())
            if size > floor(before):
                raise AssertionError(
                    f"after decoding ({self.convention.says}) a plain pass of "
                    f"{time} tokens differs by {size:.2g} from the one "
                    f"before: it takes what is left in the cache"
                )

    def require_half(self, time: int, generator: torch.Generator) -> None:
        """Require that a model that runs in bfloat16 decodes in it."""
        tokens = self.draw(1, time, generator)
        try:
            half = copy_for(self.subject, HALF[0])
            half.scores(tokens)
        except (CopyFailed, SkipCheck):
            return
        try:
            self.bind(half.model)
            self.in_pieces(tokens, [1] * time)
        except ModelRaised as error:
            if maker := self.convention.without_dtype:
                self.note += f"; not in bfloat16: {maker}() takes no dtype"
            elif OF_DTYPES.search(sentence(error.__cause__ or error)):
                raise AssertionError(
                    f"in bfloat16 the full forward answers, and decoding "
                    f"({self.convention.says}) does not: {error}"
                ) from error.__cause__

    def compare(self, tokens: Tensor, splits: list[list[int]]) -> None:
        """Require that tokens fed in pieces have the scores of the whole."""
        full = self.full(tokens)
        for pieces in splits:
            several = max(pieces[1:], default=1) > 1
            if several and (self.note or self.convention.whole):
                continue
            try:
                self.require(tokens, pieces, full=full)
                if {*pieces} == {1}:
                    self.stepped = max(self.stepped, len(pieces))
            except ModelRaised as error:
                if not several:
                    raise
                self.note = f"; goes on with one token at a time only: {error}"

    def compare_positions(self, time: int, generator: torch.Generator) -> str:
        """Require the same with positions given that the model may count.

        Returns:
            The words of a report for these arguments.
        """
        chosen = self.convention
        tokens, half, said = self.draw(1, time, generator), time // 2, ""
        splits = [[1] * time, [half, time - half]] if half else []
        if chosen.position is not None or chosen.cache is None:
            return ""
        for name in chosen.optional:
            way = replace(chosen, way=replace(chosen.way, position=name))
            if self._grade(way) < WRONG:
                continue
            self.convention = way
            whole = partial(self.in_pieces, tokens, [time])
            full = partial(self.full, tokens)
            # else the argument means something else
            if self.first_gap(full, whole, (full(), whole())) is None:
                self.compare(tokens, splits)
                said += f", also with {name}"
        self.convention = chosen
        return said

    def compare_two_texts(self, time: int, generator: torch.Generator) -> None:
        """Require that a text leaves another one alone."""
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

    def compare_alike(self, time: int, generator: torch.Generator) -> None:
        """Require that a text does not move one with tokens in common."""
        first = self.draw(self.subject.fit_rows(2), time, generator)
        other = self.draw(len(first), time, generator)
        at = torch.arange(time, device=first.device)
        for how, common in (
            ("the same first tokens, ", at < 2 * time // 3),
            ("all tokens but the last, ", at < time - 1),
            ("all tokens but the first, ", at > 0),
        ):
            tokens = torch.where(common, first, other)

            def second(tokens: Tensor = tokens) -> Tensor:
                steps = [1] * time
                return [self.in_pieces(ids, steps) for ids in (first, tokens)][
                    1
                ]

            how = f"after a text with {how}"
            self.require(tokens, [1] * time, how, decode=second)

    def in_turns(self, pair: list[Tensor]) -> Tensor:
        """Return the scores of two texts, each a token at a time."""
        texts = [Text(self.convention, len(tokens)) for tokens in pair]
        columns = zip(*(tokens.split(1, 1) for tokens in pair), strict=True)
        self.scored = pair[0].new_ones(pair[0].size(1), dtype=torch.bool)
        parts = [torch.cat([*map(self.scores, texts, c)]) for c in columns]
        return torch.cat(parts, dim=1)

    def compare_padded(self, time: int, generator: torch.Generator) -> None:
        """Require the same of rows of unlike length, padded on the left."""
        if (
            MASK not in self.convention.arguments
            or self.convention.position in POSITIONS  # the mask has others
            or time < 4
        ):
            return
        tokens = self.draw(self.subject.fit_rows(3), time, generator)
        mask = torch.ones_like(tokens).triu()  # a column more in each row
        how = "rows of unlike length padded on the left, "
        try:
            self.require(tokens, _prompt_first(time), how, mask)
        except ModelRaised as error:  # its mask may mean something else
            self.note += f"; not with a mask: {error}"
            return
        state = self.convention.cache in STATES  # its mask comes first
        if time < 6 or self.note or self.convention.whole or state:
            return
        how = "rows padded on the left into the second piece, "
        with suppress(ModelRaised):
            self.require(tokens, [2, time - 2], how, mask.triu(1))

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
                "with a cache one more token is answered, which the full "
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
        forward = partial(self.full, tokens, mask)
        full = forward() if full is None else full
        gap = self.first_gap(forward, decode, (full, decode()), mask)
        if gap is None:
            return
        pieces = self.cut(pieces)
        (row, position), (batch, time) = gap.at, tokens.shape
        count = sum(end <= position for end in accumulate(pieces))
        start, size = sum(pieces[:count]), pieces[count]
        fed = " + ".join(map(str, pieces[:6])) + " + ..." * (len(pieces) > 6)
        line = None if how else self.first_line(tokens, pieces, position)
        where = "" if line is None else f"; first seen at {line}"
        raise FailureAt(
            f"with a cache ({self.convention.says}), {how}fed as {fed} "
            f"tokens, position {position} of {time} in row {row} of {batch}, "
            f"in the piece of {size} after {start}, differs from the full "
            f"forward by {gap.size:.2g}{where}",
            line.place if line else None,
        )

    def first_gap(
        self,
        forward: Callable[[], Tensor],
        decode: Callable[[], Tensor],
        known: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
    ) -> Gap | None:
        """Return the first position at which decoding really differs.

        Known holds the scores of both; the mask says what to compare.
        """
        shown = self.scored.expand(known[0].shape[:2])
        if mask is not None:
            shown = shown & mask.bool().cpu()
        first, at = None, torch.arange(shown.size(1), device=shown.device)
        while gap := real_gap(self.model, forward, decode, known, shown):
            first = gap  # the largest of those before
            shown = shown & (at < gap.at[1])
        return first

    def first_line(
        self, tokens: Tensor, pieces: list[int], position: int
    ) -> Line | None:
        """Return the first line that differs in the piece with a position."""
        count = sum(end <= position for end in accumulate(pieces))
        tokens = tokens[:, : sum(pieces[: count + 1])]
        text = Text(self.convention, len(tokens))
        *before, last = tokens.split(pieces[: count + 1], 1)
        whole = partial(self.full, tokens)
        sizes = tokens.size(1), last.size(1)
        with suppress(Exception):  # a model may need what a mode takes away
            for piece in before:
                text.feed(piece)
            feed = partial(self.scores, text, last)
            return first_in_last_piece(self.model, feed, whole, sizes)
        return None


def _prompt_first(time: int) -> list[int]:
    """Return pieces of which all but the first are one token."""
    first = time // 2 + 1
    return [first, *[1] * (time - first)]


def _grown(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether no tensor of a cache, nor an axis of one, has lost a part."""
    same = len(before) == len(after)
    if same and isinstance(before, list):
        return all(map(_grown, before, after))
    return same and all(map(le, before, after))


# --- A model's own generate, where no way to decode is found -----------------

COUNTS = (
    *("max_new_tokens", "new_tokens", "num_new_tokens", "n_new_tokens"),
    *("max_tokens", "num_tokens", "n_tokens", "steps"),
)
GREEDY = {"do_sample": False, "top_k": 1, "temperature": 1.0}
NEEDED = (
    "give the model init_cache(batch) and decode(tokens, cache), or name "
    "what makes its cache: --cache my_pkg:make_cache"
)


def compare_generate(subject: Subject, reason: str) -> str:
    """Require the same ids of generate with and without its cache.

    Raises:
        SkipCheck: for a model without it; the reason is that of others.
    """
    fresh, *enlarged = both(subject)
    generate = getattr(fresh.model, "generate", lambda: 0)
    arguments, _ = token_argument(generate)
    flag = next((n for n in arguments if FLAG.fullmatch(n)), None)
    count = next((n for n in COUNTS if n in arguments), None)
    if flag is None or count is None:
        may = [n for n in subject.caller.optional if CACHED.search(n)]
        if may and not reason:
            reason = f"{' and '.join(may)} may take one"
        because = f" ({reason})" if reason else ""
        raise SkipCheck(f"no cache was found{because}: {NEEDED}")
    subject.require_no_noise()
    options = {n: v for n, v in GREEDY.items() if n in arguments}
    prompt = subject.draw(4, subject.block_size // 2).to(subject.device)
    new = min(8, subject.block_size - prompt.size(1))
    ways = f"generate with {flag}=True and {flag}=False, {new} new tokens"
    for variant in (*enlarged, fresh):
        state, texts = KeptState(variant.model), []
        variant.model.eval()
        for value in (False, True):
            state.put_back(always=True)
            seed_all(subject.seed)  # for one that draws all the same
            with during(f"in generate with {flag}={value}"), torch.no_grad():
                given = {count: new, flag: value}
                answer = variant.model.generate(
                    prompt.clone(), **options, **given
                )
                texts.append(_rows(answer)[..., -new:])
        if texts[0].shape != texts[1].shape:
            shapes = " and ".join(str((*text.shape,)) for text in texts)
            raise AssertionError(f"{ways}: of shapes {shapes}, without first")
        for row, at in (texts[0] != texts[1]).nonzero().tolist()[:1]:
            without, cached = (int(text[row, at]) for text in texts)
            raise AssertionError(
                f"{ways}: new token {at} of row {row} is {cached} with the "
                f"cache and {without} without, behind {prompt.size(1)} tokens"
            )
    return f"decoding: {ways}: the same ids"


def _rows(answer: Any) -> Tensor:
    """Return ids as (rows, time), of a tensor, a list or a generator."""
    if inspect.isgenerator(answer):
        answer = [*answer]
    if isinstance(answer, tuple):
        answer = answer[0]
    if isinstance(answer, list) and isinstance(answer[0], Tensor):
        answer = torch.cat([part.reshape(len(part), -1) for part in answer], 1)
    ids = torch.as_tensor(answer)
    return ids.unsqueeze(0) if ids.dim() == 1 else ids
