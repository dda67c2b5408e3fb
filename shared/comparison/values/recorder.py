"""A mode of torch that notes each floating value that is computed inside."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .below import Below, is_value, same_storage, tensors_in
from .insides import INSIDES, steps_inside
from .places import Locator, Place, Stack
from .value import Value, digest

# What multiplies queries, keys, weights and values of many heads.
PRODUCTS = (
    "matmul",
    "__matmul__",
    "bmm",
    "einsum",
    "scaled_dot_product_attention",
)


class Recorder(TorchFunctionMode):
    """Notes each floating result of a torch function called inside.

    Args:
        locator: finds the places.
        by_heads: whether values of many heads are noted head by head, too.
        visitors: None in a first run, in which digests are kept; else what
            to do with some values, and no digests.
    """

    def __init__(
        self,
        locator: Locator,
        by_heads: bool,
        visitors: Mapping[int, Callable[[Tensor], None]] | None = None,
    ):
        super().__init__()
        self.locator = locator
        self.by_heads = by_heads
        self.visitors = visitors
        self.below = Below(self)
        self.values: list[Value] = []
        self.stacks: list[Stack] = []
        self.numbers = WeakTensorKeyDictionary()
        self.steps: set[int] = set()
        self.events = 0
        self.rests = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Note nothing of what is computed inside."""
        before, self.rests = self.rests, True
        try:
            yield
        finally:
            self.rests = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a torch function, and note what it gives."""
        kwargs = kwargs or {}
        if self.rests:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "function")
        operands = tensors_in((args, kwargs))
        inputs = self.known([] if _shape_only(name) else operands)
        versions = [_version(tensor) for tensor in operands]
        with self.below.watch(name, inputs) as inside:
            answer = func(*args, **kwargs)
        with self.resting():
            changed = [
                tensor
                for tensor, version in zip(operands, versions, strict=True)
                if _version(tensor) != version
            ]
            results = tensors_in(answer)
            results += [t for t in changed if not _among(t, results)]
            if not any(map(is_value, results)):
                return answer
            if name in INSIDES:
                inside = []  # its formula says more than its kernels
            if name in PRODUCTS:
                for operand in operands:
                    self._note_heads(operand)
            for step, value in steps_inside(name, args, kwargs):
                number = self.note(value, name, inputs + inside, step)
                inside.append(number)
                self.steps.update({number}.difference(inputs))
                self._note_heads(value, number)
            for result in results:
                self.result(result, name, operands, inputs + inside, changed)
        return answer

    def result(
        self,
        result: Tensor,
        name: str,
        operands: list[Tensor],
        inputs: list[int],
        changed: list[Tensor],
    ) -> None:
        """Note a result, unless it only shows an operand another way."""
        if not is_value(result):
            return
        of = None
        if not _among(result, changed):
            of = next((t for t in operands if same_storage(result, t)), None)
        known = of is not None and of in self.numbers
        if of is not None and result.numel() == of.numel():
            if known:
                self.numbers[result] = self.numbers[of]
            if known or name != "__getitem__":
                return
        number = self.note(result, name, inputs, view=known)
        self.numbers[result] = number
        if result._is_view() and _among(result, changed):
            self.numbers[result._base] = number
        self._note_heads(result, number)

    def note(
        self,
        value: Tensor,
        op: str | Place,
        inputs: list[int],
        inside: str = "",
        view: bool = False,
    ) -> int:
        """Keep a value, and return its number; that of what it copies.

        In a second run the number only says that the tensor is a value.
        """
        event, self.events = self.events, self.events + 1
        if self.visitors is not None:
            if event in self.visitors:
                self.visitors[event](value)
            return event
        found = digest(value)
        own_step = False
        for number in inputs:
            digest_before = self.values[number].digest
            if number in self.steps and not inside:
                own_step |= found.is_near(digest_before)
            elif found.is_copy(digest_before):
                return number
        number = len(self.values)
        place, stack = (
            (op, ()) if isinstance(op, Place) else self.locator.find(op)
        )
        self.stacks.append(stack)
        self.values.append(
            Value(
                number=number,
                event=event,
                place=replace(place, inside=inside or place.inside),
                shape=tuple(value.shape),
                dtype=value.dtype,
                inputs=tuple(dict.fromkeys(inputs)),
                view=view,
                own_step=own_step,
                call=(place.path, place.function, stack[1:]),
                digest=found,
            )
        )
        return number

    def _note_heads(self, value: Tensor, number: int | None = None) -> None:
        """Note each head of a (batch, heads, time, size) value."""
        if number is None:
            number = self.numbers.get(value)
        if not self.by_heads or value.dim() != 4 or number is None:
            return
        # a second run has no values, and needs no places
        place = self.values[number].place if self.values else None
        step = f"{place.inside}, " if place and place.inside else ""
        for head in range(value.size(1) if value.size(1) > 1 else 0):
            one, inside = value[:, head], f"{step}head {head}"
            self.note(one, place or "", [number], inside, view=True)

    def known(self, tensors: list[Tensor]) -> list[int]:
        """Return the numbers of those tensors that are values."""
        return [self.numbers[t] for t in tensors if t in self.numbers]


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _shape_only(name: str) -> bool:
    """Whether a function looks at no more than its operand's shape."""
    return name.endswith("_like") or name.startswith("new_")


def _version(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is written to."""
    return 0 if tensor.is_inference() else tensor._version
