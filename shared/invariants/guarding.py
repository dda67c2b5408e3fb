"""Guard a script against leaks, by a few calls and without a copy."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..running.context import draws_put_back, seed_all
from ..running.errors import Leaked
from ..running.model.calling import (
    BATCH_FIRST,
    TIME_FIRST,
    Form,
    shape_of,
    tensors_in,
)
from ..running.operations import as_written
from ..running.rounding import floor, gaps
from ..tracing.lines import Line, first_in_two_texts
from ..visibility import Declared, causal, declared_by
from .leaks import unseen

SHARES = (1 / 2, 0.0, 7 / 8)  # positions to try, as shares of the length
MOST_ASKED = 64  # most positions from which those to try are chosen
# rounding: up to so many times the difference between two equal calls
TIMES_NOISE = 4.0
# largest noise, as a share of the largest score: more would hide a leak
MOST_NOISE = 0.1
FORMS: tuple[Form, ...] = (BATCH_FIRST, ("batch * time", "vocab"), TIME_FIRST)
SEED = 0  # seed of each call; the caller's random states are restored


def guard(
    model: Callable[..., Any],
    tokens: Any,
    *,
    sees: Any = causal,
    scores: Callable[[Any], Tensor] | None = None,
) -> None:
    """Raise AssertionError if a score depends on a token it may not see.

    The guard calls the model at most eight times, as it is, and restores
    random states. It tests only these texts; `check_model` proves more. In
    train mode each call has the same random numbers. These calls update
    running statistics.

    Args:
        model: the model, which is called with tokens.
        tokens: tokens of an evaluation, on the model's device.
        sees: a declaration of `gpt_duet.visibility`; None means causal.
        scores: a function from an answer to scores (batch, time, vocab); None
            takes the logits, or the first tensor with this shape.

    Raises:
        AssertionError: with the position, the token, and the line of the
            model where the two texts first differ.
        ValueError: for tokens that are not a batch of texts, an answer
            without scores, or scores that cannot be compared.
    """
    _require_ids(tokens)
    declared = declared_by(sees, tokens.size(1)) or Declared(causal)
    calls = _Calls(model, tokens, scores)
    base = calls(tokens)
    noise = _noise(base, calls(tokens))
    for position in _positions(declared, tokens):
        changed = _changed(tokens, declared, position)
        still = unseen(declared, tokens, changed).to(base.device)
        apart = gaps(calls(changed), base).masked_fill(~still, 0.0)
        if not float(apart.max()) > noise:
            continue
        row, position = divmod(int(apart.argmax()), tokens.size(1))
        raise _leak(calls, declared, base, changed, row, position, noise)


def _require_ids(tokens: Any) -> None:
    found = f"{type(tokens).__name__}"
    if isinstance(tokens, Tensor):
        found = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        whole = not (tokens.is_floating_point() or tokens.is_complex())
        if tokens.ndim == 2 and whole and len(tokens) and tokens.size(1) > 1:
            return
    raise ValueError(
        f"guard takes ids of shape (batch, time) with a time of 2 or more, "
        f"got {found}"
    )


def _noise(base: Tensor, again: Tensor) -> float:
    """Return how far two calls with the same text may differ.

    Raises:
        ValueError: if the difference is too large to compare other texts.
    """
    odd = float(base.isnan().any(-1).double().mean())
    if odd:
        raise ValueError(
            f"scores of {odd:.0%} of the positions are NaN: nothing can be "
            f"compared with them"
        )
    noise = TIMES_NOISE * float(gaps(again, base).max())
    finite = base[base.isfinite()].double()
    most = MOST_NOISE * float(finite.abs().max()) if len(finite) else 0.0
    if noise > max(most, floor(base)):
        raise ValueError(
            f"two calls with the same tokens differ by "
            f"{noise / TIMES_NOISE:.2g}: the model keeps a state, or draws "
            f"from its own random generator, which would hide a leak"
        )
    return max(noise, floor(base))


def _positions(declared: Declared, tokens: Tensor) -> list[int]:
    """Choose positions to try; most tokens are hidden from at least one."""
    time = tokens.size(1)
    if declared.sees is causal:
        return [int(share * time) for share in SHARES]
    forbidden = ~declared.of(tokens[:1])[0]
    left, seen = forbidden.float(), (~forbidden).float()
    some = torch.arange(0, time, max(1, time // MOST_ASKED))
    # [position, i]: whether the position sees none of the tokens that are
    # hidden from position some[i]
    still = (seen @ forbidden[some].float().mT == 0).float()
    found = []
    for _ in SHARES:
        shown = ((left.mT @ still).mT * forbidden[some]).sum(1)
        best = int(shown.argmax())
        found.append(int(some[best]))
        tried = still[:, best, None] * forbidden[some[best]]
        left = left * (1 - tried)
    return found


@dataclass(frozen=True)
class _Calls:
    """Calls the user's model, each time from the same random state."""

    model: Callable[..., Any]
    tokens: Tensor
    scores: Callable[[Any], Tensor] | None

    def __call__(self, tokens: Tensor) -> Float[Tensor, "batch time vocab"]:
        rows, time = tokens.shape
        with draws_put_back(), torch.no_grad():
            seed_all(SEED)
            answer = self.model(tokens)
            found = answer if self.scores is None else self.scores(answer)
        for value in (getattr(found, "logits", None), found):
            for form in FORMS:
                for _, tensor in tensors_in(value):
                    read = _read(tensor, form, rows, time)
                    if read is not None:
                        return read
        raise ValueError(
            f"no scores of shape ({rows}, {time}, vocab) were found in the "
            f"answer: give scores=, from an answer to its scores"
        )


def _read(
    tensor: Tensor, form: Form, rows: int, time: int
) -> Float[Tensor, "batch time vocab"] | None:
    """Return a tensor as (batch, time, vocab); None for another form."""
    if tensor.ndim != len(form) or not tensor.is_floating_point():
        return None
    width = tensor.size(form.index("vocab"))
    if tensor.shape != shape_of(form, rows, time, width):
        return None
    if len(form) < len(BATCH_FIRST):
        return tensor.view(rows, time, width)
    return tensor.permute([form.index(axis) for axis in BATCH_FIRST])


def _changed(tokens: Tensor, declared: Declared, position: int) -> Tensor:
    """Return texts with other ids wherever a position must not see them.

    The new ids occur in the texts, so the model accepts them.
    """
    relations = declared.of(tokens)[:, position].to(tokens.device)
    ids = tokens.unique()
    other = ids[(torch.searchsorted(ids, tokens) + 1) % len(ids)]
    other = other if len(ids) > 1 else (tokens == 0).to(tokens)
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
    """Return the failure, with the token that leaks and the line."""
    tokens = calls.tokens
    differ = (tokens != changed)[row].nonzero().flatten()
    each = tokens[row].repeat(len(tokens), 1)
    few = differ[(differ - position).abs().argsort()][: len(each)]
    some = torch.arange(len(few))
    each[some, few] = changed[row, few]
    apart = gaps(
        calls(each)[: len(few), position],
        base[row, position].expand(len(few), -1),
    )
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
    """Return the first line where a later token changes an earlier value.

    Return None if an earlier token is forbidden, because positions between the
    two may see it.
    """
    tokens = calls.tokens
    if bool((tokens != changed)[row, : position + 1].any()):
        return None
    one = tokens.clone()
    one[row] = changed[row]
    # the model may not run under the mode that records lines
    with suppress(Exception), as_written():
        return first_in_two_texts(
            calls.model,
            (lambda: calls(tokens), lambda: calls(one)),
            (len(tokens), tokens.size(1)),
            position + 1,
            noise / max(size, noise),
        )
    return None
