"""Feeds a model piece by piece, with its cache, and compares."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelRaised, SkipCheck, asked
from ..model.calling import MASK, token_argument
from ..model.reading import describe, find_scores, follow
from ..model.sizes import has_position_table, padding_ids
from ..model.subject import Subject
from ..model.tokens import draw
from ..search.tolerance import floor, gaps, is_real, minus, rounding

CONVENTION = ("init_cache", "decode")  # methods of a model with a cache
STATES = ("cache_params", "state")  # of a recurrence: nothing to hide later
# Arguments of a model's own call: the cache so far, which comes back with
# the scores; and where the tokens start, with the cache inside the model.
CACHES = (
    *("past_key_values", "kv_cache", "kv_caches", "cache", "layer_past"),
    *STATES,
)
START = "start_pos"


def decoder_of(subject: Subject) -> "Decoder":
    """Return what decodes with the model's cache, as its convention is."""
    masked = subject.caller.takes_mask
    model: Any = subject.precise(masked)
    if isinstance(model, nn.Module):
        model.eval()
    if all(callable(getattr(model, n, None)) for n in CONVENTION):
        arguments, _ = token_argument(model.decode)
        return Decoder(subject, model, model, MASK in arguments)
    arguments, _ = token_argument(model)
    for name in (*CACHES, START):
        if name in arguments and subject.caller.method is None:
            own = _OwnCall(subject, model, name, "use_cache" in arguments)
            return Decoder(subject, model, own, masked)
    raise SkipCheck(
        f"the model has no init_cache(batch) and decode(), and takes none of "
        f"{', '.join((*CACHES, START))}"
    )


class _OwnCall:
    """init_cache and decode for a model whose own call takes its cache."""

    def __init__(self, subject: Subject, model: Any, name: str, asked: bool):
        self.subject, self.model, self.name = subject, model, name
        self.extra = {"use_cache": True} if asked else {}
        self.start = 0

    def init_cache(self, batch: int) -> None:
        self.start = 0
        if self.subject.keeps_state:
            self.subject.start_again(self.model)

    def decode(
        self, tokens: Tensor, cache: Any, **mask: Tensor
    ) -> tuple[Any, Any]:
        given = self.start if self.name == START else cache
        self.start += tokens.size(1)
        extra = {**self.extra, **mask, self.name: given}
        answer = self.subject.caller.call(self.model, tokens, **extra)
        if self.name == START:
            return answer, None
        if isinstance(answer, Mapping):
            return answer, answer.get(self.name)
        after = getattr(answer, self.name, None)
        if after is None and isinstance(answer, tuple) and len(answer) > 1:
            after = answer[-1]
        return answer, after


class Decoder:
    """Decodes with a model's cache, and compares with the full forward.

    Attributes:
        cached: has init_cache and decode.
        name: of the argument that takes the cache, or "".
        masked: whether decode takes a mask of padding.
        told: what the report should say.
    """

    def __init__(
        self, subject: Subject, model: Any, cached: Any, masked: bool
    ):
        self.subject, self.model = subject, model
        self.cached, self.masked = cached, masked
        self.name = cached.name if isinstance(cached, _OwnCall) else ""
        self.told = ""

    def decode(
        self, tokens: Tensor, cache: object, **mask: Tensor
    ) -> tuple[Tensor, object]:
        """Return the scores of these tokens, and the cache after them."""
        batch, time = tokens.shape
        what = f"in decode(), on tokens of shape {(batch, time)}"
        with asked(what), torch.no_grad():
            answer = self.cached.decode(tokens.clone(), cache, **mask)
        found = find_scores(answer, batch, time, self.subject.vocab_size)
        found = [f for f in found if f[1] == self.subject.reader.form] or found
        if not found:
            vocab = self.subject.vocab_size
            raise AssertionError(
                f"with a cache ({batch}, {time}) ids give {describe(answer)} "
                f"where scores of shape ({batch}, {time}, {vocab}) should be"
            )
        path, form = found[0]
        scores = form.read(follow(answer, path), batch, time)
        if isinstance(answer, tuple) and len(answer) == 2 and path[0] == 0:
            cache = cache if answer[1] is None else answer[1]
        if cache is None and self.name in CACHES:
            raise SkipCheck(
                f"no {self.name} comes with the scores, under this name or "
                f"as the last of a tuple"
            )
        self.subject.costs.charge(scores)
        return scores, cache

    def in_pieces(
        self, tokens: Tensor, pieces: list[int], mask: Tensor | None = None
    ) -> Tensor:
        """Return the scores of tokens that are fed piece by piece."""
        cache = self.cached.init_cache(tokens.size(0))
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
        full = self.subject.scores(self.model, tokens)
        for pieces in splits:
            several = self.name in CACHES and max(pieces[1:], default=1) > 1
            if several and self.told:
                continue
            shown = " + ".join(map(str, pieces[:6]))
            try:
                self.require(
                    partial(self.in_pieces, tokens, pieces),
                    tokens,
                    f"fed as {shown} tokens",
                    full=full,
                )
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

        def one_after_the_other() -> Tensor:
            return [self.in_pieces(tokens, pieces) for tokens in pair][1]

        how = "after another text with the same first row"
        self.require(one_after_the_other, pair[1], how)

    def in_turns(self, pair: list[Tensor]) -> Tensor:
        """Return the scores of two texts, each a token at a time."""
        caches: list[object] = [
            self.cached.init_cache(len(tokens)) for tokens in pair
        ]
        parts = []
        for column in zip(
            *(tokens.split(1, 1) for tokens in pair), strict=True
        ):
            answers = [*map(self.decode, column, caches)]
            caches = [cache for _, cache in answers]
            parts.append(torch.cat([scores for scores, _ in answers]))
        return torch.cat(parts, dim=1)

    def compare_padded(self, time: int, generator: torch.Generator) -> None:
        """Require the same of rows of unlike length, padded on the left."""
        rows = self.subject.fit_rows(3)
        if not self.masked or time < 4:
            return
        tokens = self.draw(rows, time, generator)
        mask = torch.ones_like(tokens)
        for row in range(rows):
            mask[row, :row] = 0
        try:
            self.require(
                partial(self.in_pieces, tokens, _prompt_first(time), mask),
                tokens,
                "rows of unlike length padded on the left",
                mask,
            )
        except ModelRaised as error:  # its mask may mean something else
            self.told += f"; not with a mask: {error}"

    def require_an_end(self, tokens: Tensor) -> None:
        """Require that the last token is refused, if it is without a cache."""
        subject, end = self.subject, tokens.size(1) - 1
        ends = (
            subject.limit is not None
            and subject.limit.value == end
            and has_position_table(self.model, end, subject.vocab_size)
        )
        if not ends or tokens.device.type != "cpu":
            return
        with suppress(ModelRaised):
            subject.scores(self.model, tokens)
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

        Args:
            decode: decodes them.
            tokens: ids.
            how: they are decoded, for the failure.
            mask: of padding, where nothing is compared.
            full: the scores of the full forward, where they are known.
        """

        def forward() -> Tensor:
            return self.subject.scores(self.model, tokens, mask=mask)

        full = forward() if full is None else full
        moved = gaps(decode(), full)
        if mask is not None:
            moved = moved.where(mask.bool(), 0.0)
        row, position = divmod(int(moved.argmax()), tokens.size(1))
        size = float(moved[row, position])

        def difference() -> Tensor:
            return minus(decode(), forward())[row, position]

        if size > floor(full) and is_real(
            self.model, difference, rounding(full)
        ):
            batch, time = tokens.shape
            raise AssertionError(
                f"with a cache, {how}, position {position} of {time} in row "
                f"{row} of {batch} differs from the full forward by {size:.2g}"
            )


def _prompt_first(time: int) -> list[int]:
    """Return pieces of which all but the first are one token."""
    first = time // 2 + 1
    return [first, *[1] * (time - first)]
