"""Compare decoding with a cache to one forward pass over the whole text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Int
from torch import Tensor

from ...running.context import isolated, one_run
from ...running.decoding import Decoder
from ...running.errors import ModelRaised, SkipCheck
from ...running.rounding import floor, gaps
from ...tracing.lines import Line
from ...tracing.pieces import CacheComparison
from .given import DRAWN, Model, as_tokens, fitting, subject_of

DRAWN_ROWS = 2  # draw several rows, because a cache may mix them up


@dataclass(frozen=True)
class CacheDiff:
    """How the scores of cached decoding differ from those of a full pass."""

    # how the cache is passed, such as "past_key_values and use_cache=True"
    says: str
    tokens: list[int]  # tokens of the row that the result shows
    fed: list[int]  # number of tokens in each piece of the text that was fed
    # the difference of scores at each position; None where the model returns
    # none, because it scores only the last position of a piece
    apart: list[float | None]
    rounding: float  # the difference that rounding can cause
    position: int | None = None  # the first position that differs, if any
    line: Line | None = None  # the first line that differs at `position`

    @property
    def same(self) -> bool:
        """Return whether decoding equals the full pass."""
        return self.position is None

    @property
    def sentence(self) -> str:
        """Return the finding in one sentence."""
        largest = max(size for size in self.apart if size is not None)
        if self.position is None:
            bound = f"rounding can cause up to {self.rounding:.1g}"
            if largest > self.rounding:
                bound = "rounding in a coarser dtype inside explains it"
            return (
                f"one function: decoding with a cache ({self.says}) equals "
                f"the full pass at {len(self.apart)} positions; scores "
                f"{largest:.1g} apart, {bound}"
            )
        where = ""
        if self.line is not None:
            place = self.line.place
            layer = "" if place.layer is None else f", layer {place.layer}"
            size = f"its value is {self.line.apart:.2g} apart"
            if self.line.kept:
                size = "it keeps {} of {} positions".format(*self.line.kept)
            where = f" at {self.line}{place.site}{layer}: {size}"
        fed = "one by one"
        if max(self.fed) > 1:
            more = " + ..." * (len(self.fed) > 3)
            fed = f"as {' + '.join(map(str, self.fed[:3]))}{more}"
        return (
            f"decoding with a cache ({self.says}), fed {fed}, first differs "
            f"from the full pass at position {self.position}{where}; scores "
            f"{self.apart[self.position]:.2g} apart"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the result, ready for JSON."""
        line = self.line
        found = {k: v for k, v in vars(self).items() if k != "line"}
        return found | {
            "place": line and line.place.to_dict(),
            "inner": line and line.apart,
            "same": self.same,
            "sentence": self.sentence,
        }


@one_run
def diff_cache(
    model: Model,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
    cache: Callable[..., Any] | None = None,
) -> CacheDiff:
    """Compare decoding with a cache to the full pass of the same model.

    Tokens are fed in three ways: one by one; one by one after a prompt; and in
    two pieces. The cache is found in the same way as by check_cache.

    Args:
        model: a model, as for diff_by_value.
        tokens: ids; None draws two rows of 16 random ids from a fixed seed.
        vocab_size: number of tokens, if the model does not declare it.
        cache: a function that makes an empty cache, as for check_model; or a
            function step(model, tokens, cache) that returns scores and the
            next cache. The first call of step gets None as cache. If this
            argument is None, the kit looks for the model's cache.

    Raises:
        ValueError: if no cache is found, or a new cache still holds an earlier
            text; if the model draws random numbers in eval mode, or raises;
            if the tokens do not fit the model.
    """
    given = None if tokens is None else as_tokens(tokens)
    length = DRAWN if given is None else given.size(1)
    subject = subject_of(
        model, (DRAWN_ROWS, length), vocab_size, at=None, cache=cache
    ).with_room()
    rows = subject.fit_rows(DRAWN_ROWS)
    given = fitting(given, subject.block_size, subject.vocab_size, rows)
    if given.size(1) < 2:
        raise ValueError("decoding takes at least 2 tokens, got 1")
    try:
        with isolated(subject.seed), subject.few_threads():
            subject.require_no_noise()
            subject.require_no_state()
            decoder = Decoder(subject, enlarged=False)
            if decoder.convention is None:
                reason = f": {decoder.reason}" if decoder.reason else ""
                raise SkipCheck(f"no cache was found{reason}")
            comparison = CacheComparison(decoder)
            comparison.require_reset(
                subject.lengths.fit(4), subject.generator()
            )
            return _compare(comparison, given.to(subject.device))
    except (SkipCheck, AssertionError) as error:
        raise ValueError(f"{subject.name}: {error}") from error.__cause__


def _compare(comparison: CacheComparison, tokens: Tensor) -> CacheDiff:
    """Feed tokens in three ways; return the first result that differs.

    If none differs, return the result of the first way.
    """
    decoder = comparison.decoder
    time = tokens.size(1)
    half = time // 2
    found: list[CacheDiff] = []
    full = decoder.full(tokens)
    forward = partial(decoder.full, tokens)
    ones = [1] * time
    for fed in (ones, [half, *ones[half:]], [half, time - half]):
        several = max(fed[1:]) > 1
        if several and decoder.convention.whole:
            continue
        decode = partial(decoder.in_pieces, tokens, fed)
        try:
            decoded = decode()
        except ModelRaised:
            if several:  # this cache takes only one token at a time
                continue
            if time > 3:  # a shorter text may differ before decoding raises
                first = _compare(comparison, tokens[:, :half])
                if not first.same:
                    return first
            raise
        fed = decoder.cut(fed)
        gap = comparison.first_gap(forward, decode, (full, decoded))
        row, position = gap.at if gap else (0, None)
        line = None
        if gap is not None:
            line = comparison.first_line(tokens, fed, gap.at[1])
        sizes = gaps(full, decoded)[row].tolist()
        known = decoder.scored.tolist()
        found.append(
            CacheDiff(
                decoder.convention.says,
                tokens[row].tolist(),
                fed,
                [a if b else None for a, b in zip(sizes, known, strict=True)],
                floor(full),
                position,
                line,
            )
        )
        if gap is not None:
            return found[-1]
    return found[0]
