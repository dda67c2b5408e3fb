"""One operation, as a rule sees it; and the rules by name."""

import math
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..running.operations import base_name, tensors_in
from .codes import (
    KNOWN,
    STRONG,
    WEAK,
    full,
    is_hidden,
    is_lowered,
    lowest,
    plain,
    where_known,
)

# --- Calls and rules ---------------------------------------------------------

Rule = Callable[["Call"], Tensor | list[Tensor] | None]
RULES: dict[str, Rule] = {}
# Their first argument gives a shape, or room for the result.
OVERWRITTEN: set[str] = set()
PLACED: set[str] = set()  # operations whose rules say what is lowered


def rule(
    names: str, placed: bool = False, overwrites: bool = False
) -> Callable[[Rule], Rule]:
    """Register a rule for operations; in-place ones have the same.

    Args:
        names: of the operations.
        placed: whether the rule itself says which results a token may have
            lowered; else all are that may.
        overwrites: whether the numbers of `self` are of no account.
    """

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        if placed:
            PLACED.update(names.split())
        if overwrites:
            OVERWRITTEN.update(names.split())
        return function

    return add


@cache
def parameters_of(func: Any) -> tuple[list[str], dict[str, Any], list[str]]:
    """Return an operation's parameters, their defaults, and results' names."""
    given = func._schema.arguments
    defaults = {
        a.name: a.default_value for a in given if a.has_default_value()
    }
    results = [a.name for a in given if a.is_out]
    return [a.name for a in given], defaults, results


class Call:
    """An operation's arguments, the values and the codes in them.

    Args:
        func: the operation, an overload of torch.ops.
        args, kwargs: its arguments.
        codes: the codes of each tensor among them, by id.
        values: what in-place operations have overwritten, by id.
        outs: the tensors it returned.
        note: called with the name of one of the Notes, and a mask's number.
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
        names, defaults, self.results = parameters_of(func)
        given = zip(names, args, strict=False)
        self.args: dict[str, Any] = {**defaults, **dict(given), **kwargs}
        self.name = base_name(func)
        self.func, self.outs, self.note = func, outs, note
        self._codes, self.before = codes, values
        self._consulted: set[int] = set()  # whose codes the rule asked for
        self.positional = args, kwargs
        self.hides = True  # whether any number may be hidden
        self.special = True  # whether any may be hidden, or known
        self.routing = False  # whether tokens count as routed as in this text

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument; default: for None, and where there is none."""
        value = self.args.get(name)
        return default if value is None else value

    @property
    def out(self) -> Tensor:
        """The first tensor it returned."""
        return self.outs[0]

    @cached_property
    def tensors(self) -> list[str]:
        """The names of the arguments that are tensors."""
        return [
            name
            for name, value in self.args.items()
            if isinstance(value, Tensor) and name not in self.results
        ]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the codes of a tensor among the arguments."""
        self._consulted.add(id(tensor))
        return self._codes[id(tensor)]

    def codes(self, name: str) -> Tensor:
        """Return an argument's codes; a number is known."""
        value = self.args[name]
        if isinstance(value, Tensor):
            return self.of(value)
        return full(KNOWN, 0, self.device)

    def plain(self, name: str) -> Tensor:
        """Return what an argument depends on, hidden or not."""
        codes = self.codes(name)
        return plain(codes) if self.hides else codes

    def everything(self) -> Tensor:
        """Return the largest code of all arguments."""
        self._consulted |= self._codes.keys()
        return self._largest(set(self._codes))

    def not_consulted(self) -> int:
        """Return the largest code of arguments that the rule passed over.

        A tensor that an operation overwrites as a whole is not one of them.
        """
        left = self._codes.keys() - self._consulted
        if self.name in OVERWRITTEN:
            left.discard(id(self.args.get("self")))
        return int(self._largest(left)) if left else KNOWN

    def _largest(self, ids: set[int]) -> Tensor:
        """Return the largest code of tensors, but for those of the results."""
        room = tensors_in(self.args.get(name) for name in self.results)
        codes = [self._codes[key] for key in ids - {*map(id, room)}]
        most = [plain(c).max() for c in codes if c.numel()]
        return torch.stack([full(KNOWN, 0, self.device), *most]).max()

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

    def before_it_wrote(
        self, mark: Callable[[Tensor, Tensor], None]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return its arguments as they were, marked, without room for results.

        As the operation takes them that returns what this one writes.
        """
        for key, value in self.before.items():
            mark(value, self._codes[key])
        args, kwargs = tree_map(
            lambda value: self.before.get(id(value), value), self.positional
        )
        return args, {n: v for n, v in kwargs.items() if n not in self.results}

    def known(self, name: str) -> bool:
        """Whether an argument's value is known as a whole."""
        codes = self.codes(name)
        return not codes.numel() or int(codes.max()) == KNOWN

    def zeros(self, name: str, number: float = 0) -> Tensor:
        """Where an argument is known to be 0, or another number."""
        value = self.args[name]
        if not isinstance(value, Tensor):
            return torch.tensor(value == number, device=self.device)
        codes = self.of(value)
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
        if self.out.is_floating_point():  # the result's dtype rounds it
            surest = max(surest, lowest(self.out.dtype))
        low = where_known(codes, values <= surest)
        if bool(((codes == KNOWN) & ~low).any()):
            lower = where_known(codes, values <= STRONG)
            if bool((lower & ~low).any()):
                between = values.masked_fill(values > STRONG, surest)
                self.note("masks", float(between.max()))
                low = lower | low
            elif not low.any() and where_known(codes, values <= WEAK).any():
                self.note("weak", float(values.min()))
        return hidden | low

    def low(self, name: str) -> Tensor:
        """Where an argument is, or may be, as good as minus infinity.

        A factor as large makes a number so.
        """
        codes, values = self.codes(name), self.value(name)
        low = is_hidden(codes) | is_lowered(codes)
        if not (values.is_floating_point() and (codes == KNOWN).any()):
            return low
        return low | where_known(codes, values.abs() >= -STRONG)

    def infinite(self, name: str) -> Tensor:
        """Where an argument is minus infinity for all tokens."""
        codes, values = self.codes(name), self.value(name)
        if not values.is_floating_point():
            return torch.zeros_like(codes, dtype=torch.bool)
        hidden = (is_hidden(codes) & ~is_lowered(codes)) | (codes == KNOWN)
        return where_known(torch.where(hidden, KNOWN, 0), values == -math.inf)

    def is_low(self) -> bool:
        """Whether an argument is low, or may be, anywhere."""
        return self.special and any(
            bool(self.low(name).any()) for name in self.tensors
        )
