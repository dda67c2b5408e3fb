"""Compute gradients of scores with respect to the tokens' embeddings."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..running.context import during
from ..running.model.building import is_mapped
from ..running.operations import functions_through
from ..running.ranks import largest, on_any
from ..running.variant import Variant
from .derivatives import gradients_of


class Lookups:
    """Turns the embedding vectors of tokens into leaves of autograd's graph.

    A lookup is a call of embedding, or the indexing of a table, with an
    argument that equals the tokens.
    """

    NAMES = ("embedding", "__getitem__", "index_select")

    def __init__(self, tokens: Int[Tensor, "*axes"]):
        self.tokens = tokens
        self.leaves: list[Tensor] = []
        # how many rows each table has that was looked up
        self.rows: list[int] = []

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function; if it looks up the tokens, return a leaf."""
        answer = func(*args, **kwargs)
        if is_mapped() or name not in self.NAMES:
            return answer
        if not isinstance(answer, Tensor) or not answer.is_floating_point():
            return answer
        given = [*args, *kwargs.values()]
        given = [x for x in given if isinstance(x, Tensor)]
        count = self.tokens.numel()
        looked_up = any(
            x.numel() == count
            and x.device == self.tokens.device
            and not x.is_floating_point()
            and bool((x.flatten() == self.tokens.flatten()).all())
            for x in given
        )
        if looked_up and answer.shape[:-1].numel() == count:
            tables = [x for x in given if x.is_floating_point()]
            self.rows += [x.size(0) for x in tables if x.ndim == 2]
            leaf = answer.detach().requires_grad_()
            self.leaves.append(leaf)
            # a copy, because the model may change the vectors in place
            answer = leaf.clone()
        return answer


def gradients_at(
    variant: Variant,
    tokens: Int[Tensor, "1 time"],
    positions: list[int],
    generator: torch.Generator,
    row: int | None = None,
) -> Float[Tensor, "positions time"] | None:
    """Return the gradients of some positions' scores at token embeddings.

    One backward pass serves all positions, because the batch repeats the text:
    row i is for positions[i]. There, a random combination of the scores is
    differentiated. If a row is given, only the scores of this row are
    differentiated.

    Returns:
        The largest entry of the gradient at each input position, or None if
        no embedding of the tokens can be found.
    """
    subject = variant.subject
    if len(positions) > subject.fit_rows(len(positions)) == 1:
        rows = [
            gradients_at(variant, tokens, [at], generator) for at in positions
        ]
        found = [row for row in rows if row is not None]
        return torch.cat(found) if len(found) == len(rows) else None
    batch = tokens.repeat(len(positions), 1).to(subject.device)
    lookups = Lookups(subject.caller.arranged(batch))
    with functions_through(lookups) as seen:
        scores = variant.scores(batch, grad=True)
    # no embedding of the tokens was seen, or scores do not depend on it
    if on_any(not seen.leaves or not scores.requires_grad):
        return None
    picked = scores[range(len(positions)), positions]
    weights = torch.randn(scores.size(2), generator=generator)
    combined = (picked * weights.to(picked)).sum(1)
    total = combined.sum() if row is None else combined[row]
    with during(f"in the backward pass {variant.case.mode}"):
        grads = gradients_of(total, seen.leaves, allow_unused=True)
    shape = batch.mT.shape if subject.caller.time_first else batch.shape
    found = [
        g.reshape(*shape, -1).abs().amax(-1) for g in grads if g is not None
    ]
    if on_any(not found):
        return None
    # a maximum of NaN and a number is NaN
    most = largest(torch.stack(found).amax(0))
    return most.mT if subject.caller.time_first else most
