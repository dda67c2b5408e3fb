"""Decoding with a cache against the full pass of the same model."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...invariants.context import one_run
from ...invariants.conventions import Text
from ...invariants.decoding_compared import Comparison
from ...invariants.errors import ModelRaised, SkipCheck
from ...invariants.operations import Operations
from ...invariants.randomness import isolated
from ...invariants.rounding import floor, gaps
from .given import DRAWN, Model, as_tokens, drawn, require_fit, subject_of
from .layouts import largest
from .places import Place, find_place, layers_of
from .recorder import below_autograd, is_value, tensors_in
from .value import plain

ROWS = 2  # of drawn tokens: a cache may mix its rows up
NEAR = 2 / 3  # power of the unit of rounding: inside it adds up


@dataclass(frozen=True)
class CacheDiff:
    """What decoding with a cache gives, beside the full pass.

    Attributes:
        says: the convention, "past_key_values and use_cache=True".
        tokens: of the row that is shown.
        fed: how many tokens each piece had.
        apart: how far the scores of each position are apart; None where a
            piece has those of its last position only.
        rounding: how far apart rounding may bring them.
        position: the first that differs, None where none does.
        place: the first line whose value differs there, if it is found.
        inner: how far that value is apart.
        module: the first module that differs, where no line is found.
    """

    says: str
    tokens: list[int]
    fed: list[int]
    apart: list[float | None]
    rounding: float
    position: int | None = None
    place: Place | None = None
    inner: float = 0.0
    module: str = ""

    @property
    def same(self) -> bool:
        """Whether decoding equals the full pass."""
        return self.position is None

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        largest = max(size for size in self.apart if size is not None)
        if self.position is None:
            return (
                f"one function: decoding with a cache ({self.says}) equals "
                f"the full pass at {len(self.apart)} positions; scores "
                f"{largest:.1g} apart, rounding can cause up to "
                f"{self.rounding:.1g}"
            )
        where = self.module
        if self.place is not None:
            layer = self.place.layer
            where = f" at {self.place}{self.place.site}"
            where += "" if layer is None else f", layer {layer}"
            where += f": its value is {self.inner:.2g} apart"
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
        place = self.place and self.place.to_dict()
        return {**vars(self), "place": place, "same": self.same} | {
            "sentence": self.sentence
        }


@one_run
def diff_cache(
    model: Model,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
) -> CacheDiff:
    """Compare decoding with a cache with the full pass of the same model.

    Tokens are fed one by one, then behind a prompt, then in two pieces; the
    way to decode is found as check_cache finds it.

    Args:
        model: as for diff_by_value.
        tokens: ids; None: two rows of 16 drawn from a seed.
        vocab_size: number of tokens, where the model does not declare it.

    Raises:
        ValueError: for a model whose cache is not found, or keeps the text
            before; that draws random numbers in eval mode, or raises; for
            tokens that do not fit.
    """
    given = None if tokens is None else as_tokens(tokens)
    length = DRAWN if given is None else given.size(1)
    subject = subject_of(model, length, vocab_size)
    vocab, longest = subject.vocab_size, subject.block_size
    if given is None:
        rows = subject.fit_rows(ROWS)
        given = drawn(vocab, rows * longest).view(rows, longest)
    require_fit(given, longest, vocab)
    if given.size(1) < 2:
        raise ValueError("decoding takes at least 2 tokens, got 1")
    try:
        with isolated(subject.seed), subject.few_threads():
            subject.require_no_noise()
            subject.require_no_state()
            decoder = Comparison(subject, enlarged=False)
            if decoder.convention is None:
                reason = f": {decoder.reason}" if decoder.reason else ""
                raise SkipCheck(f"no cache was found{reason}")
            decoder.require_reset(subject.lengths.fit(4), subject.generator())
            return _compare(decoder, given.to(subject.device))
    except SkipCheck as error:
        raise ValueError(f"{subject.name}: {error}") from None
    except AssertionError as error:
        raise ValueError(f"{subject.name}: {error}") from error.__cause__


def _compare(decoder: Comparison, tokens: Tensor) -> CacheDiff:
    """Return the first way of feeding tokens that differs, else the first."""
    assert decoder.convention is not None
    time = tokens.size(1)
    half = time // 2
    found: list[CacheDiff] = []
    full = decoder.full(tokens)
    forward = partial(decoder.full, tokens)
    for fed in (
        [1] * time,
        [half, *[1] * (time - half)],
        [half, time - half],
    ):
        several = max(fed[1:]) > 1
        if several and decoder.convention.one_at_a_time:
            continue
        decode = partial(decoder.in_pieces, tokens, fed)
        try:
            decoded = decode()
        except ModelRaised:
            if several:  # it goes on with one token at a time only
                continue
            raise
        gap = decoder.first_gap(forward, decode, (full, decoded))
        row = gap.at[0] if gap else 0
        sizes = gaps(full, decoded)[row].tolist()
        known = decoder.scored.tolist()
        one = CacheDiff(
            decoder.convention.says,
            tokens[row].tolist(),
            fed,
            [a if b else None for a, b in zip(sizes, known, strict=True)],
            floor(full),
        )
        if gap is not None:
            return _placed(decoder, tokens, one, row, gap.at[1])
        found.append(one)
    return found[0]


def _placed(
    decoder: Comparison,
    tokens: Tensor,
    found: CacheDiff,
    row: int,
    position: int,
) -> CacheDiff:
    """Add the first position that differs, and its line or its module."""
    found = replace(found, position=position)
    ends = [*accumulate(found.fed)]
    count = next(i for i, end in enumerate(ends) if end > position)
    with suppress(Exception):  # a model may need what a mode takes away
        line = _first_line(
            decoder, tokens[:, : ends[count]], found.fed[: count + 1]
        )
        if line is not None:
            return replace(found, place=line[0], inner=line[1])
    where = decoder.where(tokens, found.fed, count, row, position)
    return replace(found, module=where)


def _first_line(
    decoder: Comparison, tokens: Tensor, fed: list[int]
) -> tuple[Place, float] | None:
    """Return the first line whose value in the last piece differs."""
    assert decoder.convention is not None
    whole = _values(decoder.model, partial(decoder.full, tokens))
    text = Text(decoder.convention, len(tokens))
    *before, last = tokens.split(fed, 1)
    for piece in before:
        text.feed(piece)
    part = _values(decoder.model, partial(decoder.scores, text, last))
    for key, (place, value, eps) in part.items():
        if key not in whole:
            continue
        other = _last(whole[key][1], value, tokens.size(1), last.size(1))
        if other is None or not value.numel():
            continue
        gap = float(torch.where(value == other, 0, value - other).abs().max())
        if not gap <= eps**NEAR * largest(other):
            return place, gap
    return None


def _last(whole: Tensor, like: Tensor, end: int, size: int) -> Tensor | None:
    """Return the last positions of a value, or None where they are not seen.

    Like is the value of a piece: its axes of another size are time.
    """
    if whole.dim() != like.dim():
        return None
    for axis, sizes in enumerate(zip(whole.shape, like.shape, strict=True)):
        if sizes == (end, size):
            whole = whole.narrow(axis, end - size, size)
        elif sizes[0] != sizes[1]:
            return None
    return whole


def _values(
    model: Any, run: Callable[[], object]
) -> dict[object, tuple[Place, Tensor, float]]:
    """Return each floating value of a run: its line, and its rounding.

    The key is the line and how often it was there; of a module of torch's
    the module, as a model may call it from two lines.
    """
    values: dict[object, tuple[Place, Tensor, float]] = {}
    counts: Counter[object] = Counter()
    layers = layers_of(model)
    parts = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    names = {id(part): name for name, part in parts.items()}

    class Values(Operations):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            answer = func(*args, **(kwargs or {}))
            name = getattr(func, "overloadpacket", func).__name__
            for value in filter(is_value, tensors_in(answer)):
                code = _values.__code__
                place, _ = find_place(name, layers, names, code)
                if not place.in_model:
                    continue
                own = type(parts.get(place.module)).__module__
                line: object = place
                if own.startswith("torch."):
                    line = place.module, name
                counts[line] += 1
                key = line, counts[line]
                eps = torch.finfo(value.dtype).eps
                values[key] = place, plain(value).clone(), eps
            return answer

    with below_autograd(), Values():
        run()
    return values
