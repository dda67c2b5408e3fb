"""Read the loss at each position of a model that returns no scores."""

from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .errors import ModelRaised, NoTargetLeftOut
from .model.calling import find_loss
from .tolerances import SPLIT_LOSS_SHARE

MARKS = (-100, -1)  # targets to be ignored: PyTorch's mark, minGPT's


class PositionLosses:
    """Reads one target's loss at a time, while other targets are ignored."""

    mark: int | None = None  # target that the model's loss ignores

    def read(
        self,
        answer: Callable[[Int[Tensor, "batch time"]], Any],
        targets: Int[Tensor, "batch time"],
    ) -> Float[Tensor, "batch time 1"]:
        """Return each target's loss minus another id's loss at its place.

        The difference cancels terms that do not depend on targets. `answer`
        calls the model with the targets that it is given.

        Raises:
            ModelRaised: if the model cannot ignore targets, or returns
                no loss.
        """
        rows, time = targets.shape

        def loss(
            mark: int, *places: tuple[int, int], ids: Tensor = targets
        ) -> Tensor:
            given = torch.full_like(targets, mark)
            for place in places:
                given[place] = ids[place]
            found = find_loss(answer(given))
            if found is None:
                raise ModelRaised("the model returns no loss for targets")
            return found.detach()

        def leaves_out(mark: int) -> bool:
            last = (0, time - 2), (0, time - 1)
            with suppress(ModelRaised):
                one, other = (loss(mark, place) for place in last)
                both = loss(mark, *last)
                return torch.allclose(one + other, 2 * both, SPLIT_LOSS_SHARE)
            return False

        if self.mark is None:
            self.mark = next(filter(leaves_out, MARKS), None)
        if self.mark is None:
            raise NoTargetLeftOut("no target can be left out of the loss")
        mark, others = self.mark, targets ^ 1
        places = product(range(rows), range(time))
        each = torch.stack(
            [loss(mark, at) - loss(mark, at, ids=others) for at in places]
        )
        return each.view(rows, time, 1).nan_to_num()  # no target: NaN, so 0
