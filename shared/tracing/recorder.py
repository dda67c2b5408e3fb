"""Record each floating-point value that a run computes, with its line."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..running.collectives import NAMESPACES, finished, is_collective
from ..running.operations import UNSET, tensors_in
from ..running.places import (
    Place,
    Stack,
    find_call,
    layers_of,
    names_of,
)
from ..running.tolerances import FLOAT32_SHARE
from .fused_steps import FUSED_STEPS, REPEATED
from .lines import is_value
from .value import Value, digest, real

# Operations that multiply queries, keys, weights and values of many heads.
PRODUCTS = ("matmul", "bmm", "einsum", "scaled_dot_product_attention")
PARTS = ("alias", "select", "slice")  # they return a part or all of a tensor
NOT_YET = (*UNSET, "recv_")  # these return memory that is written later
WAIT = torch.ops._c10d_functional.wait_tensor
EXACT = 2**12  # a number of at most 12 bits counts as exact


@dataclass(eq=False)
class Recorder:
    """Records each floating-point result of each operation of a run.

    Pass a Recorder to `operations_through`, inside `below_autograd`.
    """

    model: object  # a model whose module names show the layer
    tokens: Tensor  # the ids of the run
    run: CodeType | None  # code that runs the model: outer frames are left out
    by_heads: bool  # whether each head is also recorded as a value
    # returns the part of a value to keep; None keeps the whole value
    reduce: Callable[[Tensor], Tensor] | None
    # None in a first run, which keeps digests; otherwise called with the
    # number of each event and its value
    visitor: Callable[[int, Tensor], None] | None
    room: float  # most numbers that a first run keeps; then only digests

    def __post_init__(self):
        self.layers = layers_of(self.model)
        self.modules = names_of(self.model)
        self.values: list[Value] = []
        # by event number: the values of a first run
        self.kept: dict[int, Tensor] | None = None if self.visitor else {}
        self.lines: dict[int, str] = {}  # by event number: its line
        self.numbers = WeakTensorKeyDictionary()
        self.detached: list[Place] = []  # lines of the model that detach
        # by tensor: the lines that rearranged it; whether it depends on tokens
        self.moves = WeakTensorKeyDictionary()
        self.made = WeakTensorKeyDictionary()
        # for each dtype: the first line that computes in it, and whether that
        # line computes a single number
        self.dtypes: dict[torch.dtype, tuple[Place, bool]] = {}
        self.steps: set[int] = set()
        self.sent: list[int] = []  # numbers of values sent to another rank
        self.events = 0
        # the recorded operation's line, its stack of calls, and the
        # lines that rearranged its operands
        self.place: Place
        self.stack: Stack = ()
        self.laid: list[Place] = []

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and record its results."""
        answer = func(*args, **kwargs)
        brought: list[Tensor] = []  # received from other ranks
        if is_collective(func) and func.namespace in NAMESPACES:
            answer, brought = finished(func, args, answer)
            if func.namespace == NAMESPACES[1]:
                brought = [*map(WAIT, brought)]
        operands = tensors_in((*args, *kwargs.values()))
        answers = brought or tensors_in((answer,))
        of_tokens = any(map(self._of_tokens, operands))
        for tensor in answers:
            self.made[tensor] = of_tokens or self.made.get(tensor, False)
        results = [t for t in answers if is_value(t)]
        if name == "send":
            self.sent += self._known(operands)
        if name == "recv_":  # a received value may depend on tokens
            self.made.update(dict.fromkeys(operands, True))
        if name in NOT_YET:
            return answer
        if not results:
            for single in answers:  # a scalar's dtype may round later products
                if single.is_floating_point():
                    self._note_dtype(single, name)
            return answer
        of_shape = name.endswith("_like") or name.startswith("new_")
        inputs = [] if of_shape else self._known(operands)
        place, stack = find_call(name, self.layers, self.modules, self.run)
        if name.startswith("detach") and place.in_model:
            self.detached.append(place)
        self.place, self.stack = place, stack
        self.laid = [m for t in operands for m in self.moves.get(t, ())]
        if name in PRODUCTS:
            for operand in operands:
                self._note_heads(operand, place)
        # the steps inside attention depend on queries and keys only
        steps = self._known(operands[:2]) if name in PRODUCTS else inputs
        formula = FUSED_STEPS.get(name, lambda *args, **kwargs: ())
        inputs += self._note_steps(formula(*args, **kwargs), steps, operands)
        schema = getattr(func, "_schema", None)
        for result in results:
            changed = any(result is operand for operand in operands)
            mutable = brought or schema is None or schema.is_mutable
            if changed and not mutable:
                continue  # the result is an unchanged argument, as from .to()
            self._note_result(result, operands, inputs, name, changed)
        return answer

    def _note_steps(
        self,
        formula: Iterable[tuple[str, Tensor]],
        inputs: list[int],
        operands: list[Tensor],
    ) -> list[int]:
        """Record the steps inside a fused operation; return their numbers."""
        added: list[int] = []
        for step, value in formula:
            inside = replace(self.place, inside=step)
            if step in REPEATED:
                of = self._known([operands[REPEATED[step]]])
                self.steps.add(self.note(value, inside, of))
                continue
            number = self.note(value, inside, [*inputs, *added])
            if number not in (*inputs, *added):
                added.append(number)
                self.steps.add(number)
            self.numbers[value] = number
            self._note_heads(value, inside)
        return added

    def _note_result(
        self,
        result: Tensor,
        operands: list[Tensor],
        inputs: list[int],
        name: str,
        changed: bool,
    ) -> None:
        """Record a result, unless it only reshapes an operand."""
        of = next((t for t in operands if _same_storage(result, t)), None)
        known = of is not None and of in self.numbers
        if of is not None and not changed and of.numel() == result.numel():
            if known:
                self.numbers[result] = self.numbers[of]
                self.moves[result] = *self.moves.get(of, ()), self.place
            if known or name not in PARTS:
                return
        before = len(self.values)
        number = self.note(result, self.place, inputs, known and not changed)
        self.numbers[result] = number
        if number < before and self.visitor is None:  # a copy of a value
            self.moves[result] = *self.laid, self.place
        self._note_heads(result, self.place)
        if changed and (whole := result._base) is not None:
            inputs = [*self._known([whole]), number]
            laid, self.laid = self.laid, []
            self.numbers[whole] = self.note(whole, self.place, inputs)
            self.laid = laid

    def note(
        self,
        value: Tensor,
        place: Place,
        inputs: list[int],
        view: bool = False,
    ) -> int:
        """Record a value; return its number, or for a copy the original's.

        In later runs it only passes the value to the visitor.
        """
        event, self.events = self.events, self.events + 1
        seen = value if self.reduce is None else self.reduce(value)
        if self.visitor is not None:
            self.visitor(event, seen)
            return event
        self.room -= seen.numel()
        if self.kept is not None:
            self.kept[event] = real(seen.detach()).to("cpu", copy=True)
            self.lines[event] = f"{place.module} {place}"
        if self.room < 0:
            self.kept = None
        found = digest(seen)
        if not found.trivial:
            self.dtypes.setdefault(value.dtype, (place, False))
        own_step = False
        for number in inputs:
            before = self.values[number].digest
            if number in self.steps and not place.inside:
                near = FLOAT32_SHARE * found.size
                own_step |= found.distance(before) <= near
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
                stack=self.stack,
                digest=found,
                moves=tuple(dict.fromkeys(self.laid)),
                constant=not self.made.get(value, True)
                and all(self.values[n].constant for n in inputs),
            )
        )
        return len(self.values) - 1

    def _of_tokens(self, tensor: Tensor) -> bool:
        """Return whether an operand depends on tokens, or holds the tokens."""
        if tensor in self.made:
            return self.made[tensor]
        ids = self.tokens
        return (
            tensor.dtype in (torch.int64, torch.int32)
            and tensor.numel() == ids.numel()
            and bool((tensor.flatten().cpu() == ids.flatten()).all())
        )

    def _note_dtype(self, single: Tensor, name: str) -> None:
        """Record the first line that computes a scalar in a dtype."""
        kind = single.dtype
        if kind in self.dtypes or single.numel() != 1:
            return
        share, _ = math.frexp(float(single))
        # exact numbers, such as powers of two and masks, show no dtype
        if math.isfinite(share) and not (share * EXACT).is_integer():
            place, _ = find_call(name, self.layers, self.modules, self.run)
            self.dtypes[kind] = place, True

    def _known(self, tensors: list[Tensor]) -> list[int]:
        """Return the value numbers of the tensors that were recorded."""
        return [self.numbers[t] for t in tensors if t in self.numbers]

    def _note_heads(self, value: Tensor, place: Place) -> None:
        """Record each head of a (batch, heads, time, size) value."""
        number = self.numbers.get(value)
        many = value.dim() == 4 and value.size(1) > 1
        if not (self.by_heads and many) or number is None:
            return
        context = self.stack, self.laid
        if self.values:  # a head's stack of calls is that of the whole value
            whole = self.values[number]
            place, self.stack = whole.place, whole.stack
        self.laid = []
        step = f"{place.inside}, " if place.inside else ""
        for head in range(value.size(1)):
            inside = replace(place, inside=f"{step}head {head}")
            self.note(value[:, head], inside, [number], view=True)
        self.stack, self.laid = context


def _same_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share memory."""
    if a.device != b.device or a.is_meta:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
