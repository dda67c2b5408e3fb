"""Decoding with a cache is the same function."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SkipCheck, asked
from ..model.calling import token_argument
from ..model.reading import find_scores, follow
from ..model.subject import Subject
from ..model.tokens import draw
from ..search.tolerance import floor, gaps, is_real, minus, rounding

CONVENTION = ("init_cache", "decode")  # methods of a model with a cache
# Arguments of a model's own call: the cache so far, which comes back with
# the scores; and where the tokens start, with the cache inside the model.
CACHES = ("past_key_values", "kv_cache", "kv_caches", "cache", "layer_past")
START = "start_pos"


def check_cache(subject: Subject) -> str:
    """Decoding with a cache, in any split, equals the full forward.

    Why: a cache that is one position off answers fluently, and wrongly.
    How: models with init_cache(batch) and decode(tokens, cache), or whose
    own call takes a cache (past_key_values, kv_cache, ...) or start_pos, get
    a sequence token by token, whole, and in pieces, in one, three and five
    rows, and two sequences in turns, each with its cache. What takes its
    cache in its own call need go on with a token at a time only.
    Cost: some 30 small forwards.
    Reports: pytorch/executorch 2010, rotary positions that start again at 0
    with each call.
    """
    model = subject.precise()
    if isinstance(model, nn.Module):
        model.eval()
    decoder = _Decoder(subject, model, _cache_of(subject, model))
    subject.require_no_noise()
    generator = subject.generator()
    longest = subject.block_size
    lengths = subject.fit(1, 7, 16)
    for batch in sorted({subject.fit_rows(rows) for rows in (1, 3, 5)}):
        for time in lengths:
            splits = _splits(time)
            calls = 1 + sum(map(len, splits))
            tokens = batch * time * (1 + len(splits))
            seconds = subject.costs.of(tokens, calls, double=True)
            if subject.costs.has_time(seconds, time, f"{batch} rows"):
                decoder.compare(batch, time, splits, generator)
    if longest > 16:
        half = longest // 2
        tail = [1] * min(4, longest - half - 1)
        rest = longest - half - sum(tail)
        seconds = subject.costs.of(2 * longest, 7, double=True)
        if subject.costs.has_time(seconds, longest):
            decoder.compare(1, longest, [[half, *tail, rest]], generator)
    if decoder.cached.name != START:  # which has one cache for all
        decoder.compare_in_turns(subject.lengths.fit(5), generator)
    how = decoder.cached.name or " and ".join(CONVENTION)
    return f"{how}: lengths to {longest}, one by one, whole and in pieces"


def _splits(time: int) -> list[list[int]]:
    splits = [[time], [1] * time]
    if time > 2:
        splits += [[time // 2, *[1] * (time - time // 2)]]
        splits += [[1, time - 1], [time - 1, 1], [time // 2, -(-time // 2)]]
    return splits


def _cache_of(subject: Subject, model: Any) -> Any:
    """Return what has init_cache and decode, and the cache's name or ""."""
    if all(callable(getattr(model, n, None)) for n in CONVENTION):
        return SimpleNamespace(
            name="", init_cache=model.init_cache, decode=model.decode
        )
    arguments, _ = token_argument(model)
    for name in (*CACHES, START):
        if name in arguments and subject.caller.method is None:
            return _OwnCall(subject, model, name, "use_cache" in arguments)
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

    def decode(self, tokens: Tensor, cache: Any) -> tuple[Any, Any]:
        given = self.start if self.name == START else cache
        self.start += tokens.size(1)
        extra = {**self.extra, self.name: given}
        answer = self.subject.caller.call(self.model, tokens, **extra)
        if self.name == START:
            return answer, None
        if isinstance(answer, Mapping):
            return answer, answer.get(self.name)
        after = getattr(answer, self.name, None)
        if after is None and isinstance(answer, tuple) and len(answer) == 2:
            after = answer[1]
        return answer, after


class _Decoder:
    """Decodes with a model's cache, and compares with the full forward."""

    def __init__(self, subject: Subject, model: Any, cached: Any):
        self.subject = subject
        self.model = model
        self.cached = cached

    def decode(self, tokens: Tensor, cache: object) -> tuple[Tensor, object]:
        """Return the scores of these tokens, and the cache after them."""
        batch, time = tokens.shape
        what = f"in decode(), on tokens of shape {(batch, time)}"
        with asked(what), torch.no_grad():
            answer = self.cached.decode(tokens.clone(), cache)
        found = find_scores(answer, batch, time, self.subject.vocab_size)
        found = [f for f in found if f[1] == self.subject.reader.form] or found
        if not found:
            vocab = self.subject.vocab_size
            raise AssertionError(
                f"decode should answer ({batch}, {time}, {vocab})"
            )
        path, form = found[0]
        scores = form.read(follow(answer, path), batch, time)
        if isinstance(answer, tuple) and len(answer) == 2 and path[0] == 0:
            cache = cache if answer[1] is None else answer[1]
        if cache is None and self.cached.name in CACHES:
            raise SkipCheck(f"no {self.cached.name} comes with the scores")
        self.subject.costs.charge(scores)
        return scores, cache

    def in_pieces(self, tokens: Tensor, pieces: list[int]) -> Tensor:
        """Return the scores of tokens that are fed piece by piece."""
        cache = self.cached.init_cache(tokens.size(0))
        parts = []
        for piece in tokens.split(pieces, dim=1):
            scores, cache = self.decode(piece, cache)
            parts.append(scores)
        return torch.cat(parts, dim=1)

    def draw(
        self, batch: int, time: int, generator: torch.Generator
    ) -> Tensor:
        """Draw ids, none of them padding: that shifts some positions."""
        vocab = self.subject.vocab_size
        tokens = draw(vocab, batch, time, generator)
        for module in getattr(self.model, "modules", list)():
            padding = getattr(module, "padding_idx", None)
            if isinstance(padding, int):
                tokens[tokens == padding] = (padding + 1) % vocab
        return tokens.to(self.subject.device)

    def compare(
        self,
        batch: int,
        time: int,
        splits: list[list[int]],
        generator: torch.Generator,
    ) -> None:
        """Require that tokens fed in pieces have the scores of the whole."""
        tokens = self.draw(batch, time, generator)
        full = self.subject.scores(self.model, tokens)
        for pieces in splits:
            if self.cached.name in CACHES and max(pieces[1:], default=1) > 1:
                continue  # not all go on with more than a token at once
            moved = gaps(self.in_pieces(tokens, pieces), full)
            size = float(moved.max())
            if not size > floor(full):
                continue

            def difference(pieces: list[int] = pieces) -> Tensor:
                full = self.subject.scores(self.model, tokens)
                return minus(self.in_pieces(tokens, pieces), full)

            if is_real(self.model, difference, rounding(full)):
                row, position = divmod(int(moved.argmax()), time)
                shown = " + ".join(map(str, pieces[:6]))
                raise AssertionError(
                    f"with a cache, fed as {shown} tokens, position "
                    f"{position} of {time} in row {row} of {batch} differs "
                    f"from the full forward by {size:.2g}"
                )

    def in_turns(self, pair: list[Tensor]) -> list[Tensor]:
        """Return the scores of two texts, each a token at a time."""
        caches: list[object] = [
            self.cached.init_cache(len(tokens)) for tokens in pair
        ]
        parts: list[list[Tensor]] = [[], []]
        for t in range(pair[0].size(1)):
            for i, tokens in enumerate(pair):
                scores, caches[i] = self.decode(
                    tokens[:, t : t + 1], caches[i]
                )
                parts[i].append(scores)
        return [torch.cat(scores, dim=1) for scores in parts]

    def compare_in_turns(self, time: int, generator: torch.Generator) -> None:
        """Require that two texts at once do not share a cache."""
        rows = self.subject.fit_rows(2)
        pair = [self.draw(rows, time, generator) for _ in range(2)]
        turns = self.in_turns(pair)
        for i, tokens in enumerate(pair):
            full = self.subject.scores(self.model, tokens)
            moved = gaps(turns[i], full)

            def difference(i: int = i, tokens: Tensor = tokens) -> Tensor:
                full = self.subject.scores(self.model, tokens)
                return minus(self.in_turns(pair)[i], full)

            if float(moved.max()) > floor(full) and is_real(
                self.model, difference, rounding(full)
            ):
                raise AssertionError(
                    f"two sequences decoded in turns disturb each other, by "
                    f"{float(moved.max()):.2g}"
                )
