"""Feeds a model piece by piece, with its cache, and compares."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .budget import Budget
from .errors import ModelRaised, SkipCheck, during
from .meeting.calling import MASK, token_argument
from .meeting.reading import describe
from .meeting.sizes import has_position_table, padding_ids
from .rounding import real_gap
from .subject import Subject
from .tokens import draw
from .variant import precise

CONVENTION = ("init_cache", "decode")  # methods of a model with a cache
STATES = ("cache_params", "state")  # of a recurrence: nothing to hide later
# Arguments of a model's own call: the cache so far, which comes back with
# the scores; and where the tokens start, with the cache inside the model.
CACHES = (
    *("past_key_values", "kv_cache", "kv_caches", "cache", "layer_past"),
    *STATES,
)
START = "start_pos"


class Decoder:
    """Decodes with a model's cache, and compares with the full forward."""

    name = ""  # of the argument of the model's own call that takes the cache
    told = ""  # what the report should say
    _start = 0  # of the next piece

    def __init__(self, subject: Subject, budget: Budget):
        self.subject, self.budget = subject, budget
        self.masked = subject.caller.takes_mask  # a mask of padding
        self.variant = precise(subject, budget, masked=self.masked)
        self.model = model = self.variant.model
        if isinstance(model, nn.Module):
            model.eval()
        if all(callable(getattr(model, n, None)) for n in CONVENTION):
            arguments, _ = token_argument(model.decode)
            self.masked = MASK in arguments
            return
        arguments, _ = token_argument(model)
        known = [name for name in (*CACHES, START) if name in arguments]
        if not known or subject.caller.method is not None:
            raise SkipCheck(
                f"the model has no init_cache(batch) and decode(), and takes "
                f"none of {', '.join((*CACHES, START))}"
            )
        self.name = known[0]
        self._extra = {"use_cache": True} if "use_cache" in arguments else {}

    def begin(self, batch: int) -> object:
        """Return an empty cache."""
        if not self.name:
            return self.model.init_cache(batch)
        self._start = 0
        if self.subject.keeps_state:
            self.variant.start_again()
        return None

    def decode(
        self, tokens: Tensor, cache: object, **mask: Tensor
    ) -> tuple[Tensor, object]:
        """Return the scores of these tokens, and the cache after them."""
        batch, time = tokens.shape
        what = f"in decode(), on tokens of shape {(batch, time)}"
        with during(what), torch.no_grad():
            answer, cache = self._answer(tokens.clone(), cache, mask)
        scores = self.subject.find(answer, batch, time)
        if scores is None:
            shape = (batch, time, self.subject.vocab_size)
            raise AssertionError(
                f"with a cache ({batch}, {time}) ids give {describe(answer)} "
                f"where scores of shape {shape} should be"
            )
        if cache is None and self.name in CACHES:
            raise SkipCheck(
                f"no {self.name} comes with the scores, under this name or "
                f"as the last of a tuple"
            )
        self.budget.charge(scores)
        return scores, cache

    def _answer(
        self, tokens: Tensor, cache: object, mask: Mapping[str, Tensor]
    ) -> tuple[Any, Any]:
        """Return what holds the scores, and the cache after these tokens."""
        if not self.name:
            answer = self.model.decode(tokens, cache, **mask)
            if not isinstance(answer, tuple) or len(answer) != 2:
                return answer, cache
            return answer[0], cache if answer[1] is None else answer[1]
        given = self._start if self.name == START else cache
        self._start += tokens.size(1)
        extra = {**self._extra, **mask, self.name: given}
        answer = self.subject.caller.call(self.model, tokens, **extra)
        if self.name == START:
            return answer, None
        if isinstance(answer, Mapping):
            return answer, answer.get(self.name)
        after = getattr(answer, self.name, None)
        if after is None and isinstance(answer, tuple) and len(answer) > 1:
            after = answer[-1]
        return answer, after

    def in_pieces(
        self, tokens: Tensor, pieces: list[int], mask: Tensor | None = None
    ) -> Tensor:
        """Return the scores of tokens that are fed piece by piece."""
        cache = self.begin(tokens.size(0))
        parts: list[Tensor] = []
        end = 0
        for piece in tokens.split(pieces, dim=1):
            end += piece.size(1)
            seen = {} if mask is None else {MASK: mask[:, :end]}
            if parts and self.name in STATES:
                seen = {}
            scores, cache = self.decode(piece, cache, **seen)
            parts.append(scores)
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

    def compare(self, tokens: Tensor, splits: list[list[int]]) -> None:
        """Require that tokens fed in pieces have the scores of the whole."""
        full = self.variant.scores(tokens)
        for pieces in splits:
            several = self.name in CACHES and max(pieces[1:], default=1) > 1
            if several and self.told:
                continue
            shown = " + ".join(map(str, pieces[:6]))
            decode = partial(self.in_pieces, tokens, pieces)
            how = f"fed as {shown} tokens"
            try:
                self.require(decode, tokens, how, full=full)
            except AssertionError as error:
                if not several:
                    raise
                self.told = f"; goes on with one token at a time only: {error}"

    def compare_two_texts(self, time: int, generator: torch.Generator) -> None:
        """Require that a text leaves another one alone."""
        rows = self.subject.fit_rows(2)
        pair = [self.draw(rows, time, generator) for _ in range(2)]
        if self.name != START:  # which has one cache for all
            self.require(
                lambda: self.in_turns(pair), torch.cat(pair), "two in turns"
            )
        pair[1][0] = pair[0][0]
        pieces = _prompt_first(time)
        self.require(
            lambda: [self.in_pieces(tokens, pieces) for tokens in pair][1],
            pair[1],
            "after another text with the same first row",
        )

    def in_turns(self, pair: list[Tensor]) -> Tensor:
        """Return the scores of two texts, each a token at a time."""
        caches = [self.begin(len(tokens)) for tokens in pair]
        columns = zip(*(tokens.split(1, 1) for tokens in pair), strict=True)
        parts = []
        for column in columns:
            answers = [*map(self.decode, column, caches)]
            caches = [cache for _, cache in answers]
            parts.append(torch.cat([scores for scores, _ in answers]))
        return torch.cat(parts, dim=1)

    def compare_padded(self, time: int, generator: torch.Generator) -> None:
        """Require the same of rows of unlike length, padded on the left."""
        if not self.masked or time < 4:
            return
        tokens = self.draw(self.subject.fit_rows(3), time, generator)
        mask = torch.ones_like(tokens).triu()  # a column more in each row
        decode = partial(self.in_pieces, tokens, _prompt_first(time), mask)
        how = "rows of unlike length padded on the left"
        try:
            self.require(decode, tokens, how, mask)
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
            self.variant.scores(tokens)
            return  # the matter of check_length_limit
        with suppress(ModelRaised):
            self.in_pieces(tokens, [end, 1])
            raise AssertionError(
                f"with a cache token {end + 1} is answered, which the full "
                f"forward refuses: the model declares {subject.limit}"
            )

    def require(
        self,
        decode: Callable[[], Tensor],
        tokens: Tensor,
        how: str,
        mask: Tensor | None = None,
        full: Tensor | None = None,
    ) -> None:
        """Require that tokens are decoded to the scores of the full forward.

        Full holds the scores of the full forward, if known. Positions that
        the mask hides are not compared.
        """

        def forward() -> Tensor:
            return self.variant.scores(tokens, mask=mask)

        full = forward() if full is None else full
        shown = None if mask is None else mask.bool()
        known = (full, decode())
        gap = real_gap(self.model, forward, decode, known, shown)
        if gap is not None:
            (row, position), (batch, time) = gap.at, tokens.shape
            raise AssertionError(
                f"with a cache, {how}, position {position} of {time} in row "
                f"{row} of {batch} differs from the full forward by "
                f"{gap.size:.2g}"
            )


def _prompt_first(time: int) -> list[int]:
    """Return pieces of which all but the first are one token."""
    first = time // 2 + 1
    return [first, *[1] * (time - first)]
