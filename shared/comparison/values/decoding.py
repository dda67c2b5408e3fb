"""Decoding with a cache against the full pass of the same model."""

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

DRAWN_ROWS = 2  # of drawn tokens: a cache may mix its rows up


@dataclass(frozen=True)
class CacheDiff:
    """The scores of decoding with a cache, compared with the full pass."""

    says: str  # the convention, "past_key_values and use_cache=True"
    tokens: list[int]  # of the row that is shown
    fed: list[int]  # how many tokens each piece had
    # of the scores of each position; None where a piece returns its last alone
    apart: list[float | None]
    rounding: float  # how far apart rounding may bring them
    position: int | None = None  # the first that differs, if one does
    line: Line | None = None  # the first whose value differs there, if found

    @property
    def same(self) -> bool:
        """Whether decoding equals the full pass."""
        return self.position is None

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
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
            f"decoding with a cache ({self.says}), fed {fed}, parts "
            f"from the full pass at position {self.position}{where}; scores "
            f"{self.apart[self.position]:.2g} apart"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
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
    """Compare decoding with a cache with the full pass of the same model.

    Tokens are fed one by one, then behind a prompt, then in two pieces; the
    way to decode is found as check_cache finds it.

    Args:
        model: as for diff_by_value.
        tokens: ids; None: two rows of 16 drawn from a seed.
        vocab_size: number of tokens, where the model does not declare it.
        cache: makes an empty one, as for check_model, or is a step of
            decoding, step(model, tokens, cache), that returns scores and the
            cache, None at first; None: it is found.

    Raises:
        ValueError: for a model whose cache is not found, or keeps the text
            before; that draws random numbers in eval mode, or raises; for
            tokens that do not fit.
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
    """Return the first way of feeding tokens that differs, else the first."""
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
            if several:  # it goes on with one token at a time only
                continue
            if time > 3:  # it may part before it raises
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
