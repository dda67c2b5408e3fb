"""One of the two models: recorded once, run again for some of its values."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...invariants.model.subject import Subject
from .recording import Recording, record, visit
from .value import plain

ROWS_AT_ONCE = 4096  # of a matrix that is nudged


class Side:
    """One of two models: copied for each run, the copy freed after it.

    Args:
        subject: the model.
        tokens: ids to run.

    Attributes:
        doubled: whether it runs in float64.
        first: the recording of its first run.
    """

    def __init__(self, subject: Subject, tokens: Int[Tensor, "batch time"]):
        self.subject = subject
        self.tokens = tokens
        self.doubled, self.by_heads = True, False
        self._record()
        self.doubled = self.dtype == torch.float64

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores in the first run."""
        return self.first.values[self.first.last].dtype

    def single(self) -> None:
        """Run in the model's own precision from now on."""
        self.doubled = False
        self._record()

    def split_heads(self) -> None:
        """Keep values of many heads head by head, too."""
        self.by_heads = True
        self._record()

    def visit(
        self,
        visitors: Mapping[int, Callable[[Tensor], None]],
        nudge: float = 0.0,
    ) -> None:
        """Run again, and hand out values by their number.

        Args:
            visitors: for a value's number what to call with it.
            nudge: relative size of a random change to all weights.
        """
        values = self.first.values
        events = {values[n].event: call for n, call in visitors.items()}
        model = self._build()
        if nudge:
            nudge_weights(model, nudge)
        visit(self.subject, model, self.tokens, events, self.by_heads)

    def unit(self) -> float:
        """Return the unit of rounding that weights and values have."""
        kinds = {value.dtype for value in self.first.values}
        return max(self._weights_unit, *(torch.finfo(k).eps for k in kinds))

    def _build(self) -> Any:
        subject = self.subject
        return subject.precise() if self.doubled else subject.build()

    def _record(self) -> None:
        model = self._build()
        self.first: Recording = record(
            self.subject, model, self.tokens, self.by_heads
        )
        self.nudgeable = (
            isinstance(model, nn.Module) and self.subject.builder.can_copy
        )
        self._weights_unit = weights_unit(model)


def keep(side: Side, numbers: Iterable[int]) -> dict[int, Tensor]:
    """Run a side again and return some of its values."""
    kept: dict[int, Tensor] = {}

    def keeper(number: int) -> Callable[[Tensor], None]:
        def call(value: Tensor) -> None:
            kept[number] = plain(value).clone()

        return call

    side.visit({number: keeper(number) for number in numbers})
    return kept


def nudge_weights(model: Any, size: float) -> None:
    """Change every weight by a random share of a relative size."""
    if not isinstance(model, nn.Module):
        return
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_floating_point() or tensor.dim() == 0:
                continue
            for part in tensor.split(ROWS_AT_ONCE):
                noise = torch.rand(part.shape, generator=generator)
                noise = noise.to(part).mul_(2).sub_(1)
                part.addcmul_(part, noise, value=size)


def weights_unit(model: Any) -> float:
    """Return the unit of rounding that a model's weights were made with.

    Weights that were float32 once keep its rounding in float64.
    """
    if not isinstance(model, nn.Module):
        return 0.0
    units = [0.0]
    for tensor in model.parameters():
        if not tensor.is_floating_point() or tensor.dim() == 0:
            continue
        some = tensor.detach()[:ROWS_AT_ONCE]
        if some.dtype != torch.float64:
            units.append(torch.finfo(some.dtype).eps)
        elif some.min() != some.max() and some.equal(some.float().double()):
            units.append(torch.finfo(torch.float32).eps)
    return max(units)
