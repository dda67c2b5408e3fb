"""Find which output positions depend on which input positions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..notebooks import progress
from ..running.context import isolated, one_run
from ..running.meeting import meet
from ..running.model.building import Model
from ..running.variant import precise
from ..settings import Settings
from .moved import influence_of
from .pictures import svg

DRAWN = 16  # number of tokens to draw if none are given


class InfluenceMap(Tensor):
    """The matrix of `influence`, which a notebook shows as a picture."""

    # operations on the matrix return plain tensors
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def _repr_html_(self) -> str:
        return svg(self)


@one_run
def influence(
    model: Model,
    tokens: Int[Tensor, "*batch time"] | Sequence[int] | None = None,
    *,
    rounds: int = 2,
    **settings: Unpack[Settings],
) -> Float[Tensor, "time time"]:
    """Return how far each input token moves the scores at each position.

    Entry [i, j] is the largest change of the scores of position i when only
    token j is replaced. The model runs in eval mode and, if it can, in
    float64. For a causal model all entries above the diagonal are 0.

    Args:
        model: a model, a function or a factory, as for check_model.
        tokens: ids of one sequence; None draws 16 from the seed.
        rounds: how many replacements of each token are tried.
        **settings: vocab_size, outputs, seed, device and layout, as for
            check_model; inputs, which are given together in each call.

    Returns:
        The matrix, output position by input position. Draw it with `save_map`
        or print it with `text_map`.

    Raises:
        ValueError: for more than one sequence, or a model that cannot be
            called.
    """
    ids = None if tokens is None else _ids(tokens)
    settings.setdefault("block_size", DRAWN)
    if ids is not None:
        settings["block_size"] = ids.numel()
    subject = meet(model, **settings)
    subject.require_scores()
    if ids is None:
        ids = subject.draw(1, subject.block_size)[0]
    if ids.numel() > subject.block_size:
        raise ValueError(
            f"{ids.numel()} tokens are more than the {subject.block_size} "
            f"that {subject.name} takes"
        )
    outside = ids[(ids < 0) | (ids >= subject.vocab_size)].tolist()
    if outside:
        raise ValueError(
            f"token {outside[0]} is outside the vocabulary of "
            f"{subject.vocab_size}"
        )
    inputs = (settings.get("inputs") or {}).items()
    given = {name: make for name, make in inputs if callable(make)}
    caller = subject.caller
    caller = replace(caller, given=caller.given | given)
    with isolated(subject.seed):
        variant = precise(replace(subject, caller=caller))
        with progress() as line:
            say = line.set_description_str
            found = influence_of(variant, ids.cpu().long(), rounds, say)
        return found.as_subclass(InfluenceMap)


def _ids(tokens: Any) -> Int[Tensor, "time"]:
    """Return the ids of one sequence, which may be given as a single row."""
    ids = torch.as_tensor([] if isinstance(tokens, str) else tokens)
    if ids.ndim == 2 and ids.size(0) == 1:
        ids = ids[0]
    whole = not ids.is_floating_point() and ids.dtype != torch.bool
    if ids.ndim != 1 or ids.numel() == 0 or not whole:
        shape = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ValueError(
            f"influence takes ids, the whole numbers of one sequence, as "
            f"[1, 2, 3], got {tokens!r:.40}, {shape}"
        )
    return ids
