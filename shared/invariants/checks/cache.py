"""Decoding with a cache is the same function."""

import torch
from torch import Tensor, nn

from ..errors import ModelRaised, SkipCheck, sentence
from ..model.reading import find_scores, follow
from ..model.subject import Model, Subject
from ..model.tokens import draw
from ..search.rounding import floor_of, gaps, is_real, rounding


def check_cache(subject: Subject) -> str:
    """Decoding with a cache, in any split, equals the full forward.

    Why: a cache that is one position off answers fluently, and wrongly.
    How: models with init_cache(batch) and decode(tokens, cache) get a
    sequence token by token, whole, and in pieces, in one, three and five
    rows, and two sequences in turns, each with its cache.
    Cost: some 30 small forwards.
    Reports: pytorch/executorch 2010, rotary positions that start again at 0
    with each call.
    """
    model = subject.precise()
    start = getattr(model, "init_cache", None)
    decode = getattr(model, "decode", None)
    if not callable(start) or not callable(decode):
        raise SkipCheck("the model has no init_cache(batch) and decode()")
    if isinstance(model, nn.Module):
        model.eval()
    generator = torch.Generator().manual_seed(subject.seed)
    longest = subject.block_size
    lengths = sorted({1, min(7, longest), min(16, longest)})
    for batch in (1, 3, 5):
        for time in lengths:
            tokens = draw(subject.vocab_size, batch, time, generator)
            tokens = tokens.to(subject.device)
            for pieces in _splits(time):
                _compare(subject, model, tokens, pieces)
    if longest > 16:
        tokens = draw(subject.vocab_size, 1, longest, generator)
        half = longest // 2
        tail = [1] * min(4, longest - half - 1)
        rest = longest - half - sum(tail)
        _compare(
            subject, model, tokens.to(subject.device), [half, *tail, rest]
        )
    _in_turns(subject, model, generator)
    return f"lengths to {longest}, one by one, whole and in pieces"


def _splits(time: int) -> list[list[int]]:
    splits = [[time], [1] * time]
    if time > 2:
        splits += [[1, time - 1], [time - 1, 1], [time // 2, -(-time // 2)]]
    return splits


def _decode(
    subject: Subject, model: Model, tokens: Tensor, cache: object
) -> tuple[Tensor, object]:
    """Return the scores of these tokens, and the cache after them."""
    batch, time = tokens.shape
    try:
        with torch.no_grad():
            answer = model.decode(tokens.clone(), cache)  # type: ignore[attr-defined]
    except Exception as error:
        raise ModelRaised(
            f"decode raised {sentence(error)} on tokens of shape "
            f"({batch}, {time})"
        ) from error
    found = find_scores(answer, batch, time, subject.vocab_size)
    found = [f for f in found if f[1] == subject.form] or found
    if not found:
        raise AssertionError(
            f"decode should answer ({batch}, {time}, {subject.vocab_size})"
        )
    path, form = found[0]
    scores = form.read(follow(answer, path), batch, time)
    if isinstance(answer, tuple) and len(answer) == 2 and path == (0,):
        cache = cache if answer[1] is None else answer[1]
    return scores, cache


def _whole(
    subject: Subject, model: Model, tokens: Tensor, pieces: list[int]
) -> Tensor:
    cache: object = model.init_cache(tokens.size(0))  # type: ignore[attr-defined]
    parts = []
    for piece in tokens.split(pieces, dim=1):
        scores, cache = _decode(subject, model, piece, cache)
        parts.append(scores)
    return torch.cat(parts, dim=1)


def _compare(
    subject: Subject, model: Model, tokens: Tensor, pieces: list[int]
) -> None:
    full = subject.scores(model, tokens)
    moved = gaps(_whole(subject, model, tokens, pieces), full)
    size, noise = float(moved.max()), rounding(full)
    if not size > floor_of(full.dtype) * noise:
        return

    def difference() -> Tensor:
        return _whole(subject, model, tokens, pieces) - subject.scores(
            model, tokens
        )

    if is_real(model, difference, noise):
        time = tokens.size(1)
        row, position = divmod(int(moved.argmax()), time)
        shown = " + ".join(map(str, pieces[:6]))
        raise AssertionError(
            f"with a cache, fed as {shown} tokens, position {position} of "
            f"{time} in row {row} of {tokens.size(0)} differs from the full "
            f"forward by {size:.2g}"
        )


def _in_turns(
    subject: Subject, model: Model, generator: torch.Generator
) -> None:
    """Two sequences at once must not share a cache."""
    time = min(5, subject.block_size)
    pair = [
        draw(subject.vocab_size, 2, time, generator).to(subject.device)
        for _ in range(2)
    ]
    caches: list[object] = [model.init_cache(2) for _ in pair]  # type: ignore[attr-defined]
    parts: list[list[Tensor]] = [[], []]
    for t in range(time):
        for i, tokens in enumerate(pair):
            scores, caches[i] = _decode(
                subject, model, tokens[:, t : t + 1], caches[i]
            )
            parts[i].append(scores)
    for tokens, scores_list in zip(pair, parts, strict=True):
        full = subject.scores(model, tokens)
        moved = gaps(torch.cat(scores_list, dim=1), full)
        if float(moved.max()) > 1e6 * rounding(full):
            raise AssertionError(
                f"two sequences decoded in turns disturb each other, by "
                f"{float(moved.max()):.2g}"
            )
