"""A mode of torch that notes each floating value that is computed inside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ...invariants.operations import Operations
from .insides import INSIDES
from .places import Place, Stack, find_place, layers_of
from .value import Value, digest, real

# What multiplies queries, keys, weights and values of many heads.
PRODUCTS = ("matmul", "bmm", "einsum", "scaled_dot_product_attention")
# What reads a part of a tensor, be it the whole.
PARTS = ("alias", "select", "slice")
NEAR = 1e-6  # of a value's size: rounding may explain so much


class Recorder(Operations):
    """Notes each floating result of an operation called inside.

    To be entered in `below_autograd`.

    Args:
        model: whose modules' names say the layer.
        run: the function that runs it.
        by_heads: whether values of many heads are noted head by head, too.
        visitor: None in a first run, in which digests are kept; else what
            is done with each value and the number of its event.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: object,
        run: Callable[..., Any],
        by_heads: bool,
        visitor: Callable[[int, Tensor], None] | None,
    ):
        super().__init__()
        self.layers = layers_of(model)
        self.run = run.__code__
        self.by_heads = by_heads
        self.visitor = visitor
        self.values: list[Value] = []
        self.numbers = WeakTensorKeyDictionary()
        self.steps: set[int] = set()
        self.events = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation, and note what it gives."""
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        results = [t for t in tensors_in(answer) if is_value(t)]
        if not results:
            return answer
        name = str(getattr(func, "overloadpacket", func)).split(".")[-1]
        operands = tensors_in((args, kwargs))
        of_shape = name.endswith("_like") or name.startswith("new_")
        inputs = [] if of_shape else self._known(operands)
        place, stack = find_place(name, self.layers, self.run)
        if name in PRODUCTS:
            for operand in operands:
                self._note_heads(operand, place, stack)
        formula = INSIDES.get(name, lambda *args, **kwargs: ())
        for step, value in formula(*args, **kwargs):
            inside = replace(place, inside=step)
            number = self.note(value, inside, inputs, stack)
            if number not in inputs:
                inputs = [*inputs, number]
                self.steps.add(number)
            self.numbers[value] = number
            self._note_heads(value, inside, stack)
        for result in results:
            changed = _among(result, operands)
            of = next((t for t in operands if _same_storage(result, t)), None)
            known = of is not None and of in self.numbers
            if of is not None and not changed and of.numel() == result.numel():
                if known:
                    self.numbers[result] = self.numbers[of]
                if known or name not in PARTS:
                    continue
            view = known and not changed
            number = self.note(result, place, inputs, stack, view)
            self.numbers[result] = number
            self._note_heads(result, place, stack)
            if changed and (whole := result._base) is not None:
                inputs = [*self._known([whole]), number]
                self.numbers[whole] = self.note(whole, place, inputs, stack)
        return answer

    def note(
        self,
        value: Tensor,
        place: Place,
        inputs: list[int],
        stack: Stack = (),
        view: bool = False,
    ) -> int:
        """Keep a value, and return its number; that of what it copies.

        In a second run the number only says that the tensor is a value.
        """
        event, self.events = self.events, self.events + 1
        if self.visitor is not None:
            self.visitor(event, value)
            return event
        found = digest(value)
        own_step = False
        for number in inputs:
            before = self.values[number].digest
            if number in self.steps and not place.inside:
                own_step |= found.distance(before) <= NEAR * found.size
            elif found.is_copy(before):
                return number
        self.values.append(
            Value(
                number=len(self.values),
                event=event,
                place=place,
                shape=tuple(real(value).shape),
                dtype=value.dtype,
                inputs=tuple(dict.fromkeys(inputs)),
                view=view,
                own_step=own_step,
                stack=stack,
                digest=found,
            )
        )
        return len(self.values) - 1

    def _known(self, tensors: list[Tensor]) -> list[int]:
        """Return the numbers of those tensors that are values."""
        return [self.numbers[t] for t in tensors if t in self.numbers]

    def _note_heads(self, value: Tensor, place: Place, stack: Stack) -> None:
        """Note each head of a (batch, heads, time, size) value."""
        if not self.by_heads or value.dim() != 4 or value.size(1) == 1:
            return
        if value not in self.numbers:
            return
        number = self.numbers[value]
        if self.values:  # where the whole value comes from
            place, stack = self.values[number].place, self.values[number].stack
        step = f"{place.inside}, " if place.inside else ""
        for head in range(value.size(1)):
            inside = replace(place, inside=f"{step}head {head}")
            self.note(value[:, head], inside, [number], stack, view=True)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Let operations inside reach a mode whole, as linear, and one by one.

    Autograd would take them apart, and the fused layers of torch's own
    Transformer would hide them. What a model caches meanwhile can be
    trained with later, which it cannot be after torch.inference_mode.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [v for v in tree_leaves(values) if isinstance(v, Tensor)]


def is_value(tensor: Tensor) -> bool:
    """Whether a tensor can be told from others by its numbers."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return numbers and tensor.numel() > 1


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same memory."""
    if a.device != b.device or a.is_meta:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
