"""Which output position depends on which input position."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .context import isolated, one_run
from .meeting.meet import Settings, meet
from .model.building import Model
from .moves.moved import influence_of
from .moves.pictures import svg
from .notebooks import progress
from .variant import precise

PLAIN: Any = torch._C._disabled_torch_function_impl
DRAWN = 16  # tokens, where none are given


class InfluenceMap(Tensor):
    """The matrix of `influence`; a notebook shows it as a picture."""

    # what is computed of it is a plain tensor
    __torch_function__ = PLAIN

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
    """Return how far each input position moves each output position.

    Entry [i, j] is the largest change of the scores of position i when token
    j alone is replaced: in float64 where the model can, in eval mode. For a
    causal model everything above the diagonal is 0.

    Args:
        model: a model, a function or a factory, as for check_model.
        tokens: ids of one sequence; None: 16 drawn from the seed.
        rounds: how many replacements of each token are tried.
        **settings: vocab_size, outputs, seed, device and layout, as for
            check_model; inputs, which are all given in each call.

    Returns:
        The matrix, output position by input position; draw it with
        `save_map` or print it with `text_map`.

    Raises:
        ValueError: for more than one sequence, or a model that cannot be
            called.
    """
    if tokens is None:
        settings.setdefault("block_size", DRAWN)
        subject = meet(model, **settings)
        subject.require_scores()
        tokens = subject.draw(1, subject.block_size)
    if isinstance(tokens, str):
        raise ValueError(
            f"influence takes ids, as [1, 2, 3], and no text: got {tokens!r}"
        )
    ids = torch.as_tensor(tokens)
    if ids.ndim == 2 and ids.size(0) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.numel() == 0:
        raise ValueError(
            f"influence takes the ids of one sequence, got shape "
            f"{tuple(ids.shape)}"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"tokens must be whole numbers, got {ids.dtype}")
    settings["block_size"] = ids.numel()
    subject = meet(model, **settings)
    subject.require_scores()
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
    with isolated(subject.seed):
        variant = precise(subject)
        given = {
            name: make
            for name, make in (settings.get("inputs") or {}).items()
            if callable(make)
        }
        if given:
            caller = subject.caller
            caller = replace(caller, given=caller.given | given)
            variant = replace(variant, subject=replace(subject, caller=caller))
        with progress() as line:
            say = line.set_description_str
            found = influence_of(variant, ids.cpu().long(), rounds, say)
        return found.as_subclass(InfluenceMap)
