"""A guard for an evaluation or a training script: a few calls, no copies."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..running.context import draws_put_back, seed_all
from ..running.errors import Leaked
from ..running.model.calling import find_scores, follow
from ..running.operations import as_written
from ..running.rounding import floor, gaps
from ..tracing.lines import Line, first_in_two_texts
from ..visibility import Declared, Sees, causal
from .leaks import unseen

SHARES = (1 / 2, 0.0, 7 / 8)  # where in a text positions are asked
SEED = 0  # of each call's random numbers, which are put back


def guard(
    model: Callable[..., Any],
    tokens: Int[Tensor, "batch time"],
    *,
    sees: Sees = causal,
    scores: Callable[[Any], Tensor] | None = None,
) -> None:
    """Raise AssertionError if a score depends on a token it may not see.

    It calls the model as it is, in its own dtype, mode and device, eight
    times at most, and puts the random states back. It tests these texts, and
    proves nothing: `check_model` does. In train mode each call has the same
    random numbers, and a model that keeps statistics keeps those of the calls.

    Args:
        model: is called with tokens.
        tokens: of an evaluation, on the model's device.
        sees: who may see whom, as `gpt_duet.visibility` has it.
        scores: finds the scores, (batch, time, vocab), in an answer; None:
            they are its logits, or its first tensor of this shape.

    Raises:
        AssertionError: with the position, the token, and the line of the
            model where the two texts first differ.
        ValueError: for tokens that are not a batch of texts, or an answer
            without scores.
    """
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.size(1) < 2:
        raise ValueError(
            f"guard takes ids of shape (batch, time) with a time of 2 or "
            f"more, got {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    calls = _Calls(model, tokens, scores)
    declared = Declared(sees)
    base = calls(tokens)
    noise = max(float(gaps(calls(tokens), base).max()), floor(base))
    for share in SHARES:
        changed = _changed(tokens, declared, int(share * tokens.size(1)))
        still = unseen(declared, tokens, changed).to(base.device)
        apart = gaps(calls(changed), base).masked_fill(~still, 0.0)
        if not float(apart.max()) > noise:
            continue
        row, position = divmod(int(apart.argmax()), tokens.size(1))
        raise _leak(calls, declared, base, changed, row, position, noise)


@dataclass(frozen=True)
class _Calls:
    """Calls of the user's model, each from the same random state."""

    model: Callable[..., Any]
    tokens: Tensor
    scores: Callable[[Any], Tensor] | None

    def __call__(self, tokens: Tensor) -> Float[Tensor, "batch time vocab"]:
        rows, time = tokens.shape
        with draws_put_back(), torch.no_grad():
            seed_all(SEED)
            answer = self.model(tokens)
            found = answer if self.scores is None else self.scores(answer)
        if isinstance(found, Tensor) and found.shape[:2] == (rows, time):
            return found
        for value in (getattr(found, "logits", None), found):
            width = _width(value, rows, time)
            for path, _ in find_scores(value, rows, time, width):
                return follow(value, path).reshape(rows, time, -1)
        raise ValueError(
            f"no scores of shape ({rows}, {time}, vocab) were found in the "
            f"answer: give scores=, from an answer to its scores"
        )


def _width(answer: Any, rows: int, time: int) -> int:
    """Return the size of the last axis of what may be scores."""
    each = [answer, *(answer if isinstance(answer, tuple | list) else ())]
    each += answer.values() if isinstance(answer, dict) else []
    for value in each:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        if floats and value.shape[:-1].numel() == rows * time:
            return value.size(-1)
    return 0


def _changed(tokens: Tensor, declared: Declared, position: int) -> Tensor:
    """Return texts with other ids where the position may not see.

    They are ids of the texts themselves, which the model knows.
    """
    relations = declared.of(tokens)[:, position].to(tokens.device)
    ids = tokens.unique()
    other = ids[(torch.searchsorted(ids, tokens) + 1) % len(ids)]
    other = other if len(ids) > 1 else (tokens + 1).clamp(max=1)
    return torch.where(relations, tokens, other)


def _leak(
    calls: _Calls,
    declared: Declared,
    base: Tensor,
    changed: Tensor,
    row: int,
    position: int,
    noise: float,
) -> AssertionError:
    """Return the failure: which token it is, and the line."""
    tokens = calls.tokens
    differ = (tokens != changed)[row].nonzero().flatten()
    each = tokens[row].repeat(len(tokens), 1)
    few = differ[(differ - position).abs().argsort()][: len(each)]
    some = torch.arange(len(few))
    each[some, few] = changed[row, few]
    apart = gaps(calls(each)[: len(few), position], base[row, position])
    forbids = f", which {declared.name} forbids"
    forbids *= declared.sees is not causal
    token, size = int(differ[0]), float(apart.max())
    what = f"the tokens from {token} on"
    if size > noise:
        token = int(few[int(apart.argmax())])
        what = f"token {token}"
    line = _line(calls, changed, row, position, size or noise, noise)
    where = f": first seen at {line}" if line is not None else ""
    return Leaked(
        f"position {position} sees {what}{forbids}{where}, at length "
        f"{tokens.size(1)}, by {size:.2g}",
        line.place if line is not None else None,
        position=position,
        token=token,
        length=tokens.size(1),
        size=size,
    )


def _line(
    calls: _Calls,
    changed: Tensor,
    row: int,
    position: int,
    size: float,
    noise: float,
) -> Line | None:
    """Return the first line that differs up to the position, if it is later.

    Where a token before the position is forbidden, positions between may see
    it: no line is named.
    """
    tokens = calls.tokens
    if bool((tokens != changed)[row, : position + 1].any()):
        return None
    one = tokens.clone()
    one[row] = changed[row]
    with suppress(Exception), as_written():  # a mode may take away much
        return first_in_two_texts(
            calls.model,
            (lambda: calls(tokens), lambda: calls(one)),
            (len(tokens), tokens.size(1)),
            position + 1,
            noise / max(size, noise),
        )
    return None
