"""One operation, as a rule sees it; and the rules by name."""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from .lattice import (
    KNOWN,
    STRONG,
    WEAK,
    full,
    is_hidden,
    lowest,
    plain,
    where_known,
)

Rule = Callable[["Call"], Tensor | list[Tensor] | None]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations; in-place ones have the same."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return add


def base_name(name: str) -> str:
    """Return an operation's name without the mark of an in-place one."""
    return name[:-1] if name.endswith("_") and name[-2:] != "__" else name


@cache
def parameters_of(func: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an operation's parameters, and their defaults."""
    given = func._schema.arguments
    defaults = {
        a.name: a.default_value for a in given if a.has_default_value()
    }
    return [a.name for a in given], defaults


class Call:
    """An operation's arguments, the values and the codes in them.

    Args:
        func: the operation, an overload of torch.ops.
        args, kwargs: its arguments.
        codes: the codes of each tensor among them, by id.
        values: what in-place operations have overwritten, by id.
        outs: the tensors it returned.
        note: called with "assumption" or "weak", and a mask's number.
    """

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        codes: dict[int, Tensor],
        values: dict[int, Tensor],
        outs: list[Tensor],
        note: Callable[[str, float], None],
    ):
        names, defaults = parameters_of(func)
        given = zip(names, args, strict=False)
        self.args: dict[str, Any] = {**defaults, **dict(given), **kwargs}
        self.name = base_name(func.overloadpacket.__name__)
        self.func, self.outs, self.note = func, outs, note
        self._codes, self.before = codes, values
        self.positional = args, kwargs
        self.hides = True  # whether any number may be hidden
        self.special = True  # whether any may be hidden, or known

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these arguments that is given."""
        for name in names:
            if self.args.get(name) is not None:
                return self.args[name]
        return default

    @property
    def out(self) -> Tensor:
        """The first tensor it returned."""
        return self.outs[0]

    @cached_property
    def tensors(self) -> list[str]:
        """The names of the arguments that are tensors."""
        return [k for k, v in self.args.items() if isinstance(v, Tensor)]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the codes of a tensor among the arguments."""
        return self._codes[id(tensor)]

    def codes(self, name: str) -> Tensor:
        """Return an argument's codes; a number is known."""
        value = self.args[name]
        if isinstance(value, Tensor):
            return self._codes[id(value)]
        return full(KNOWN, 0, self.device)

    def plain(self, name: str) -> Tensor:
        """Return what an argument depends on, hidden or not."""
        codes = self.codes(name)
        return plain(codes) if self.hides else codes

    def everything(self) -> Tensor:
        """Return the largest code of all arguments."""
        largest = [plain(c).max() for c in self._codes.values() if c.numel()]
        return torch.stack(largest).max()

    def value(self, name: str) -> Tensor:
        """Return an argument as it was before the operation."""
        value = self.args[name]
        if not isinstance(value, Tensor):
            return torch.tensor(value, device=self.device)
        return self.before.get(id(value), value)

    @property
    def device(self) -> torch.device:
        """The device of the result."""
        return self.outs[0].device

    def has_special_number(self) -> bool:
        """Whether an argument is a number of Python's that is 0 or a mask."""
        numbers = [a for a in self.positional[0] if isinstance(a, int | float)]
        return any(a == 0 or a <= WEAK for a in numbers)

    def known(self, name: str) -> bool:
        """Whether an argument's value is known as a whole."""
        codes = self.codes(name)
        return not codes.numel() or int(codes.max()) == KNOWN

    def zeros(self, name: str, number: float = 0) -> Tensor:
        """Where an argument is known to be 0, or another number."""
        value = self.args[name]
        if not isinstance(value, Tensor):
            return torch.tensor(value == number, device=self.device)
        codes = self._codes[id(value)]
        if not (self.special and (codes == KNOWN).any()):
            return torch.zeros_like(codes, dtype=torch.bool)
        return where_known(codes, self.value(name) == number)

    def hidden(self, name: str) -> Tensor:
        """Where an argument is as good as minus infinity.

        A known number does as far as it is low enough.
        """
        codes = self.codes(name)
        hidden = is_hidden(codes)
        values = self.value(name)
        if not values.is_floating_point() or not (codes == KNOWN).any():
            return hidden
        surest = lowest(values.dtype)
        low = where_known(codes, values <= surest)
        if bool(((codes == KNOWN) & ~low).any()):
            lower = where_known(codes, values <= STRONG)
            if bool((lower & ~low).any()):
                between = values.masked_fill(values > STRONG, surest)
                self.note("assumption", float(between.max()))
                low = lower | low
            elif not bool(low.any()):
                self._note_weak(codes, values)
        return hidden | low

    def _note_weak(self, codes: Tensor, values: Tensor) -> None:
        weak = where_known(codes, values <= WEAK)
        if bool(weak.any()):
            self.note("weak", float(values.min()))
