"""The loss at each position, from a model that returns no scores with it."""

from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .errors import ModelRaised
from .model.reading import find_loss

if TYPE_CHECKING:
    from .variant import Variant

MARKS = (-100, -1)  # for no target: PyTorch's own, and minGPT's


def position_losses(
    variant: "Variant", tokens: Int[Tensor, "batch time"]
) -> Float[Tensor, "batch time 1"]:
    """Return the loss of each position alone, the other targets left out.

    Raises:
        ModelRaised: for a model that leaves out no target, or returns no
            loss.
    """
    (targets,) = variant.way.arguments(tokens, variant.subject.caller).values()
    rows, time = tokens.shape

    def loss(mark: int, *places: tuple[int, int]) -> Tensor:
        given = torch.full_like(targets, mark)
        for place in places:
            given[place] = targets[place]
        found = find_loss(variant.answer(tokens, targets=given))
        if found is None:
            raise ModelRaised(f"no loss comes back {variant.way.name}")
        return found.detach()

    def leaves_out(mark: int) -> bool:
        last = (0, time - 2), (0, time - 1)
        with suppress(ModelRaised):
            one, other = (loss(mark, place) for place in last)
            return torch.allclose(one + other, 2 * loss(mark, *last), 1e-3)
        return False

    copy = variant.copy
    if copy.mark is None:
        copy.mark = next(filter(leaves_out, MARKS), None)
    if copy.mark is None:
        raise ModelRaised("no target can be left out of the loss")
    places = product(range(rows), range(time))
    each = torch.stack([loss(copy.mark, place) for place in places])
    return each.view(rows, time, 1).nan_to_num()  # 0: of no target
