"""Compare decoding in pieces with the full forward (one uncached pass)."""

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..running.context import during, seed_all
from ..running.conventions import POSITIONS, Text, emptier_of
from ..running.decoding import WRONG, Decoder
from ..running.errors import FailureAt, ModelRaised, SkipCheck, sentence
from ..running.model.calling import MASK, token_argument
from ..running.model.inputs import CACHED, FLAG, STATES
from ..running.model.kept_state import KeptState
from ..running.model.sizes import has_position_table
from ..running.rounding import Gap, floor, gaps, real_gap
from ..running.subject import Subject
from ..running.variant import CopyFailed, both, copy_for
from ..running.ways import HALF
from .last_piece import first_in_last_piece
from .lines import Line

OF_DTYPES = re.compile(r"dtype|[Ff]loat|Half")  # dtypes in torch's messages


class CacheComparison:
    """Compares scores decoded with a cache to those of the full forward.

    Each method requires one property of a cache, and raises AssertionError if
    the cache lacks it. Most messages name the first position that differs. For
    a new property, add a method that check_cache calls.
    """

    note = ""  # for the report: which texts the cache does not support
    stepped = 0  # tokens of the longest text that is fed one by one

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def require_reset(self, time: int, generator: torch.Generator) -> None:
        """Require that a reset keeps a text from affecting the next one."""
        decoder = self.decoder
        chosen = decoder.convention
        tokens = decoder.draw(1, time, generator)
        feed = partial(decoder.in_pieces, tokens, [1] * time)
        if chosen.apart:
            self._require_emptied(tokens)
            return
        decoder.start_again()
        first = feed()
        self._require_again(first, feed)
        if chosen.reset is None:
            return
        feed()  # with a first text, the model reserves the cache's memory
        decoder.convention = replace(chosen, begin=chosen.reset)
        names = [n for n in chosen.way.methods if n.startswith("reset")]
        try:
            again = feed()
        except ModelRaised:  # the reset removes the cache's memory
            return
        finally:
            decoder.convention = chosen
        self._require_again(first, lambda: again, f" after {names[0]}() only")

    def _require_emptied(self, tokens: Tensor) -> None:
        """Require that a cache is empty after its method clears it."""
        decoder = self.decoder

        def fed(cache: Any = None) -> tuple[Tensor, Any]:
            text = Text(decoder.convention, 1)
            text.cache = text.cache if cache is None else cache
            pieces = tokens.split(1, 1)
            scores = [decoder.scores(text, piece) for piece in pieces]
            return torch.cat(scores, 1), text.cache

        first, cache = fed()
        empties = emptier_of(cache)
        if empties is None:
            return
        with suppress(ModelRaised):  # the method may remove the cache's memory
            with during("to empty a cache"):
                empties()
            again, _ = fed(cache)
            how = f" after {empties.__name__}() of its cache"
            self._require_again(first, lambda: again, how)

    def _require_again(
        self, first: Tensor, feed: Callable[[], Tensor], how: str = ""
    ) -> None:
        """Require that a text gets the same scores if it is decoded again."""
        said = ""
        try:
            size = float(gaps(first, feed()).max())
            if size > floor(first):
                said = f"the same tokens again{how} differ by {size:.2g}"
        except ModelRaised as error:
            said = str(error)
        if said:
            raise AssertionError(
                f"with a cache ({self.decoder.convention.says}), "
                f"{first.size(1)} tokens stay in the cache for the next text: "
                f"{said}"
            )

    def require_plain(self, time: int, generator: torch.Generator) -> None:
        """Require that decoding leaves calls without a cache unchanged."""
        decoder = self.decoder
        if decoder.subject.keeps_state:
            return
        tokens, other = decoder.draw(2, time, generator).split(1)
        before = decoder.full(tokens)
        decoder.in_pieces(other, [1] * time)
        with suppress(ModelRaised):  # such calls may be refused
            size = float(gaps(decoder.variant.scores(tokens), before).max())
            if size > floor(before):
                raise AssertionError(
                    f"after decoding ({decoder.convention.says}) a plain pass "
                    f"of {time} tokens differs by {size:.2g} from the one "
                    f"before: it takes what is left in the cache"
                )

    def require_half(self, time: int, generator: torch.Generator) -> None:
        """Require that a model that runs in bfloat16 decodes in bfloat16."""
        decoder = self.decoder
        tokens = decoder.draw(1, time, generator)
        try:
            half = copy_for(decoder.subject, HALF[0])
            half.scores(tokens)
        except (CopyFailed, SkipCheck):
            return
        try:
            decoder.bind(half.model)
            decoder.in_pieces(tokens, [1] * time)
        except ModelRaised as error:
            cause = error.__cause__ or error
            if maker := decoder.convention.without_dtype:
                self.note += f"; not in bfloat16: {maker}() takes no dtype"
            elif OF_DTYPES.search(sentence(cause)):
                raise AssertionError(
                    f"in bfloat16 the full forward answers, and decoding "
                    f"({decoder.convention.says}) does not: {error}"
                ) from error.__cause__

    def compare(self, tokens: Tensor, splits: list[list[int]]) -> None:
        """Require that texts fed in pieces get the scores of whole texts."""
        decoder = self.decoder
        full = decoder.full(tokens)
        for pieces in splits:
            several = max(pieces[1:], default=1) > 1
            if several and decoder.goes_on_by_one:
                continue
            try:
                self.require(tokens, pieces, full=full)
                if {*pieces} == {1}:
                    self.stepped = max(self.stepped, len(pieces))
            except ModelRaised as error:
                if not several:
                    raise
                decoder.one_by_one = True
                self.note = f"; goes on with one token at a time only: {error}"

    def compare_positions(self, time: int, generator: torch.Generator) -> str:
        """Require unchanged scores if positions are given explicitly.

        Returns:
            For the report: the position arguments that were tried, in words.
        """
        decoder = self.decoder
        chosen = decoder.convention
        tokens = decoder.draw(1, time, generator)
        half, said = time // 2, ""
        splits = [[1] * time, [half, time - half]] if half else []
        if chosen.position is not None or chosen.cache is None:
            return ""
        for name in chosen.optional:
            way = replace(chosen, way=replace(chosen.way, position=name))
            if decoder.grade(way) < WRONG:
                continue
            decoder.convention = way
            whole = partial(decoder.in_pieces, tokens, [time])
            full = partial(decoder.full, tokens)
            # only if scores stay: otherwise the argument has another meaning
            if self.first_gap(full, whole, (full(), whole())) is None:
                self.compare(tokens, splits)
                said += f", also with {name}"
        decoder.convention = chosen
        return said

    def compare_two_texts(self, time: int, generator: torch.Generator) -> None:
        """Require that two texts, in turns or in sequence, do not interact."""
        decoder = self.decoder
        rows = decoder.subject.fit_rows(2)
        pair = [decoder.draw(rows, time, generator) for _ in range(2)]
        if decoder.convention.apart:
            turns, both = partial(self.in_turns, pair), torch.cat(pair)
            self.require(both, [1] * time, "two in turns, ", decode=turns)
        pair[1][0] = pair[0][0]
        pieces = _prompt_first(time)

        def second() -> Tensor:
            return [decoder.in_pieces(tokens, pieces) for tokens in pair][1]

        how = "after another text with the same first row, "
        self.require(pair[1], pieces, how, decode=second)

    def compare_alike(self, time: int, generator: torch.Generator) -> None:
        """Require that a text does not affect a later, similar text."""
        decoder = self.decoder
        first = decoder.draw(decoder.subject.fit_rows(2), time, generator)
        other = decoder.draw(len(first), time, generator)
        at = torch.arange(time, device=first.device)
        for how, common in (
            ("the same first tokens, ", at < 2 * time // 3),
            ("all tokens but the last, ", at < time - 1),
            ("all tokens but the first, ", at > 0),
        ):
            tokens = torch.where(common, first, other)

            def second(tokens: Tensor = tokens) -> Tensor:
                steps = [1] * time
                return [
                    decoder.in_pieces(ids, steps) for ids in (first, tokens)
                ][1]

            how = f"after a text with {how}"
            self.require(tokens, [1] * time, how, decode=second)

    def in_turns(self, pair: list[Tensor]) -> Tensor:
        """Return the scores of two texts whose tokens are fed alternately."""
        decoder = self.decoder
        texts = [Text(decoder.convention, len(tokens)) for tokens in pair]
        columns = zip(*(tokens.split(1, 1) for tokens in pair), strict=True)
        decoder.scored = pair[0].new_ones(pair[0].size(1), dtype=torch.bool)
        parts = [torch.cat([*map(decoder.scores, texts, c)]) for c in columns]
        return torch.cat(parts, dim=1)

    def compare_padded(self, time: int, generator: torch.Generator) -> None:
        """Require equal scores for rows of any length, padded on the left."""
        decoder = self.decoder
        if (
            MASK not in decoder.convention.arguments
            or decoder.convention.position in POSITIONS  # masks move positions
            or time < 4
        ):
            return
        tokens = decoder.draw(decoder.subject.fit_rows(3), time, generator)
        # each row has one more padding token than the row above
        mask = torch.ones_like(tokens).triu()
        how = "rows of unlike length padded on the left, "
        try:
            self.require(tokens, _prompt_first(time), how, mask)
        except ModelRaised as error:  # its mask may mean something else
            self.note += f"; not with a mask: {error}"
            return
        state = decoder.convention.cache in STATES  # this state takes no mask
        if time < 6 or decoder.goes_on_by_one or state:
            return
        how = "rows padded on the left into the second piece, "
        with suppress(ModelRaised):
            self.require(tokens, [2, time - 2], how, mask.triu(1))

    def require_an_end(self, tokens: Tensor) -> None:
        """Require that decoding refuses a token that the forward refuses."""
        decoder = self.decoder
        subject, end = decoder.subject, tokens.size(1) - 1
        if (
            subject.limit is None
            or subject.limit.value != end
            or not has_position_table(decoder.model, end, subject.vocab_size)
            or tokens.device.type != "cpu"
        ):
            return
        with suppress(ModelRaised):
            decoder.full(tokens)
            return  # no limit: check_length_limit reports this
        with suppress(ModelRaised):
            decoder.in_pieces(tokens, [end, 1])
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

        `full` has the scores of the full forward, if it has run. Positions
        that the mask hides are not compared.

        Raises:
            AssertionError: with the first position that differs.
        """
        decoder = self.decoder
        decode = decode or partial(decoder.in_pieces, tokens, pieces, mask)
        forward = partial(decoder.full, tokens, mask)
        full = forward() if full is None else full
        gap = self.first_gap(forward, decode, (full, decode()), mask)
        if gap is None:
            return
        pieces = decoder.cut(pieces)
        (row, position), (batch, time) = gap.at, tokens.shape
        count = sum(end <= position for end in accumulate(pieces))
        start, size = sum(pieces[:count]), pieces[count]
        fed = " + ".join(map(str, pieces[:6])) + " + ..." * (len(pieces) > 6)
        line = None if how else self.first_line(tokens, pieces, position)
        where = "" if line is None else f"; first seen at {line}"
        raise FailureAt(
            f"with a cache ({decoder.convention.says}), {how}fed as {fed} "
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
        """Return the first position where decoding differs beyond rounding.

        `known` has the results of both functions; the mask selects positions.
        """
        decoder = self.decoder
        shown = decoder.scored.expand(known[0].shape[:2])
        if mask is not None:
            shown = shown & mask.bool().cpu()
        first, at = None, torch.arange(shown.size(1), device=shown.device)
        while gap := real_gap(decoder.model, forward, decode, known, shown):
            first = gap  # next, search before the position of the largest gap
            shown = shown & (at < gap.at[1])
        return first

    def first_line(
        self, tokens: Tensor, pieces: list[int], position: int
    ) -> Line | None:
        """Return the first line that differs in the position's piece."""
        decoder = self.decoder
        count = sum(end <= position for end in accumulate(pieces))
        tokens = tokens[:, : sum(pieces[: count + 1])]
        text = Text(decoder.convention, len(tokens))
        *before, last = tokens.split(pieces[: count + 1], 1)
        whole = partial(decoder.full, tokens)
        sizes = tokens.size(1), last.size(1)
        with suppress(Exception):  # the model may not run while it is observed
            for piece in before:
                text.feed(piece)
            feed = partial(decoder.scores, text, last)
            return first_in_last_piece(decoder.model, feed, whole, sizes)
        return None


def _prompt_first(time: int) -> list[int]:
    """Return the sizes of pieces: a prompt, then single tokens."""
    first = time // 2 + 1
    return [first, *[1] * (time - first)]


# --- A model's own generate, if no convention is found -----------------------

COUNTS = (
    *("max_new_tokens", "new_tokens", "num_new_tokens", "n_new_tokens"),
    *("max_tokens", "num_tokens", "n_tokens", "steps"),
)
GREEDY = {"do_sample": False, "top_k": 1, "temperature": 1.0}
STEP = "step(model, tokens, cache)"
NEEDED = (
    "give the model init_cache(batch) and decode(tokens, cache), or name "
    "what makes its cache: --cache my_pkg:make_cache"
)


def compare_generate(subject: Subject, reason: str) -> str:
    """Require that generate returns the same ids with and without a cache.

    Raises:
        SkipCheck: if there is no such generate; the message has `reason`.
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
        raise SkipCheck(_not_found(subject, fresh.model, reason))
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
            seed_all(subject.seed)  # in case the model draws random numbers
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


def _not_found(subject: Subject, model: Any, reason: str) -> str:
    """Return why decoding is impossible, and what the user can declare."""
    because, maker = f" ({reason})" if reason else "", subject.make_cache
    if maker is None:
        return f"no cache was found{because}: {NEEDED}"
    title = getattr(maker, "__name__", type(maker).__name__)
    arguments, name = token_argument(model)
    names = ", ".join(dict.fromkeys(filter(None, (name, *arguments))))
    return (
        f"{title} makes a cache, but no argument of forward({names}) is known "
        f"to take it{because}: give a {STEP}, which returns scores and the "
        f"cache, None at first: --cache my_pkg:step"
    )


def _rows(answer: Any) -> Tensor:
    """Return ids as (rows, time), from a tensor, a list or a generator."""
    if inspect.isgenerator(answer):
        answer = [*answer]
    if isinstance(answer, tuple):
        answer = answer[0]
    if isinstance(answer, list) and isinstance(answer[0], Tensor):
        answer = torch.cat([part.reshape(len(part), -1) for part in answer], 1)
    ids = torch.as_tensor(answer)
    return ids.unsqueeze(0) if ids.dim() == 1 else ids
