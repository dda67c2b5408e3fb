"""What a torch function computes on its way to the result."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...invariants.model.operations import Operations

if TYPE_CHECKING:
    from .recorder import Recorder

# Operations that compute nothing, beside those that are views.
LAYOUT = (
    "_unsafe_view",
    "_reshape_alias",
    "clone",
    "_to_copy",
    "copy_",
    "empty_like",
)


class Below(Operations):
    """Sees what a torch function computes on its way to the result.

    Most functions compute one thing. Of one that computes several, such as
    multi_head_attention_forward, each is noted. So is an operation that is
    called with no torch function around it.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: "Recorder"):
        super().__init__()
        self.recorder = recorder
        self.name = ""
        self.inputs: list[int] = []
        self.inside: list[int] = []
        self.waiting: list[tuple[Tensor, str, bool]] = []

    @contextmanager
    def watch(self, name: str, inputs: list[int]) -> Iterator[list[int]]:
        """Note what is computed inside; its numbers are in the list after.

        The inputs are numbers of the values that torch's function is given.
        """
        self.name, self.inputs = name, inputs
        self.inside, self.waiting = [], []
        try:
            yield self.inside
        finally:
            self.name = ""
        if self.inside:
            # the last thing computed is the result
            while self.waiting and not self.waiting.pop()[2]:
                pass
            self._note_waiting()
        self.waiting = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation, and keep what it computes until the next one."""
        kwargs = kwargs or {}
        if self.recorder.rests:
            return func(*args, **kwargs)
        name = str(getattr(func, "overloadpacket", func)).split(".")[-1]
        if not self.name:
            return self._alone(func, name, args, kwargs)
        computes = name not in LAYOUT and not getattr(func, "is_view", False)
        if computes and any(computed for *_, computed in self.waiting):
            # noted now: this operation may write over it
            self._note_waiting()
        answer = func(*args, **kwargs)
        results = [t for t in tensors_in(answer) if is_value(t)]
        if computes:
            self.waiting += [(t, name, True) for t in results[:1]]
        elif self.waiting or self.inside:
            whole = max((t.numel() for t in tensors_in(args)), default=0)
            parts = [t for t in results if t.numel() < whole]
            self.waiting += [(t, name, False) for t in parts]
        return answer

    def _note_waiting(self) -> None:
        with self.recorder.resting():
            for value, name, _ in self.waiting:
                known = self.inputs + self.inside
                self.inside.append(
                    self.recorder.note(value, self.name, known, name)
                )
        self.waiting = []

    def _alone(self, func, name, args, kwargs):
        operands = tensors_in((args, kwargs))
        answer = func(*args, **kwargs)
        results = tensors_in(answer)
        changed = [t for t in results if any(t is other for other in operands)]
        with self.recorder.resting():
            inputs = self.recorder.known(operands)
            for result in results:
                self.recorder.result(result, name, operands, inputs, changed)
        return answer


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [v for v in tree_leaves(values) if isinstance(v, Tensor)]


def is_value(tensor: Tensor) -> bool:
    """Whether a tensor can be told from others by its numbers."""
    return tensor.is_floating_point() and tensor.numel() > 1


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same memory."""
    if a.device != b.device or a.is_meta:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
