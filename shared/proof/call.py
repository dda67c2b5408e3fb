"""Describe an operation to the rule that finds its dependency codes."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..running.operations import (
    KERNELS,
    base_name,
    is_composite,
    is_view,
    tensors_in,
)
from .codes import (
    KNOWN,
    STRONG,
    WEAK,
    as_dtype,
    full,
    is_hidden,
    is_lowered,
    lowest,
    plain,
    where_known,
)

# --- Facts of an operation, equal for all of its calls -----------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of an operation that do not depend on its arguments.

    Attributes:
        name: the operation's name, as base_name returns it.
        view: whether all results share memory with an argument.
        composite: whether the operation is defined by other operations.
        written: the index and the name of each argument that is written to.
        random: whether the operation draws random numbers.
        reshapes: whether the operation changes an argument's shape in place.
        by_numbers: whether an argument's entries decide the shape of a result,
            or become Python values.
    """

    name: str
    view: bool
    composite: bool
    written: tuple[tuple[int, str], ...]
    random: bool
    reshapes: bool
    by_numbers: bool

    def written_by(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the arguments that a call of this operation writes to."""
        return tensors_in(
            args[place] if place < len(args) else kwargs.get(name)
            for place, name in self.written
        )


# Dispatch keys of kernels that a model's Python code may replace.
COMPUTING = {*KERNELS, "CompositeImplicitAutograd"}
OF_TORCH = {"_foreach_mm"}  # torch itself registers Python kernels for these


def replaced_kernels() -> frozenset[str]:
    """Return the aten operations that now have a kernel in Python."""
    return _replaced(len(torch.library._impls))


@lru_cache(1)
def _replaced(count: int) -> frozenset[str]:
    """Return the replaced operations; `count` is only a cache key."""
    parts = (kernel.split("/") for kernel in torch.library._impls)
    return frozenset(
        f"{space}::{name}"
        for space, name, key in parts
        if space == "aten" and key in COMPUTING and name not in OF_TORCH
    )


@cache
def facts_of_replaced(func: Any) -> Facts:
    """Return the facts of an operation that Python code replaces."""
    name = f"{base_name(func)} in Python"
    return replace(facts_of(func), name=name, view=False, composite=False)


@cache
def facts_of(func: Any) -> Facts:
    """Return the facts of an operation, from its schema and its tags."""
    tags = func.tags
    return Facts(
        name=base_name(func),
        view=is_view(func),
        composite=is_composite(func),
        written=tuple(
            (place, a.name)
            for place, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ),
        random=torch.Tag.nondeterministic_seeded in tags,
        reshapes=torch.Tag.inplace_view in tags,
        by_numbers=torch.Tag.dynamic_output_shape in tags
        or torch.Tag.data_dependent_output in tags
        or _returns_numbers(func),
    )


# Operations that return Python values without reading a tensor's entries.
BY_SHAPE = {"_fused_sdp_choice", "is_same_size", "is_set_to", "is_pinned"}
BY_SHAPE |= {"is_coalesced", "sparse_dim", "dense_dim", "_dimI", "_dimV"}
BY_SHAPE |= {"_has_same_storage_numel", "_nested_get_ragged_idx"}
BY_SHAPE |= {"q_per_channel_axis", "_cslt_sparse_mm_search"}


def _returns_numbers(func: Any) -> bool:
    """Return whether an operation turns a tensor into Python values."""
    kinds = [str(result.type) for result in func._schema.returns]
    if not kinds or base_name(func) in BY_SHAPE:
        return False
    return not any("Tensor" in kind for kind in kinds)


STRIDED = torch.strided


def sorted_tensors(
    values: Iterable[Any], found: list[Tensor], lost: list[Tensor]
) -> None:
    """Add strided tensors to `found`, and others (sparse ones) to `lost`."""
    for value in values:
        if isinstance(value, Tensor):
            (found if value.layout is STRIDED else lost).append(value)
        elif isinstance(value, list | tuple):
            sorted_tensors(value, found, lost)
        elif isinstance(value, dict):
            sorted_tensors(value.values(), found, lost)


# --- Calls and rules ---------------------------------------------------------

Rule = Callable[["Call"], Tensor | list[Tensor] | None]
RULES: dict[str, Rule] = {}
# Operations that do not read the entries of their first argument.
OVERWRITTEN: set[str] = set()
PLACED: set[str] = set()  # operations whose rules mark low results themselves


def rule(
    names: str, placed: bool = False, overwrites: bool = False
) -> Callable[[Rule], Rule]:
    """Register a rule for operations and their in-place versions.

    Args:
        names: names of the operations.
        placed: whether the rule itself marks the entries that may count as
            minus infinity. Otherwise one low argument marks all entries.
        overwrites: whether the operation writes `self` without reading it.
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
    """Return the names of parameters, the defaults, and the `out` names."""
    given = func._schema.arguments
    defaults = {
        a.name: a.default_value for a in given if a.has_default_value()
    }
    results = [a.name for a in given if a.is_out]
    return [a.name for a in given], defaults, results


TERMS = ("self", "other", "alpha", "beta", "value", "max")  # may be numbers
IDS = ("index", "indices")
SCALARS = (int, float, complex)
# Pointwise operations that may return finite numbers for NaN, and other ones
# than for 0. So may polynomials, and nan_to_num, which has a rule of its own.
NAN_TO_FINITE = {"fmax", "fmin", "copysign", "heaviside", "threshold"}
NAN_TO_FINITE |= {"igamma", "igammac"}


class Call:
    """A call of an operation, as its rule sees it.

    Args:
        func: the operation, an overload of torch.ops.
        args, kwargs: the operation's arguments.
        codes: the codes of each tensor among the arguments, by id.
        values: overwritten arguments as they were before, by id.
        outs: the tensors that the operation returned.
        note: a function that records a note, given a field of Notes and a
            mask's value (or 0).
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
        self.given, self.before = codes, values  # keys: tensor ids
        self._consulted: set[int] = set()  # tensors whose codes were read
        self.positional = args, kwargs
        self.device = outs[0].device
        self.hides = True  # whether some number may be hidden
        self.special = True  # whether some number may be hidden or known
        self.routing = False  # whether ids that route tokens count as known

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default if it is None or missing."""
        value = self.args.get(name)
        return default if value is None else value

    def result(self) -> Tensor:
        """Return the first result, so that a rule may read its entries."""
        return self.outs[0]

    @property
    def whole(self) -> "Call":
        """Return this call itself; an Unread call returns the full call."""
        return self

    @property
    def out(self) -> Tensor:
        """Return the operation's first result."""
        return self.outs[0]

    @cached_property
    def tensors(self) -> list[str]:
        """Return the names of the arguments that are tensors."""
        return [
            name
            for name, value in self.args.items()
            if isinstance(value, Tensor) and name not in self.results
        ]

    @cached_property
    def terms(self) -> list[str]:
        """Return the names of the tensors, and of numbers used as operands."""
        numbers = [n for n in TERMS if isinstance(self.args.get(n), SCALARS)]
        return [*self.tensors, *numbers]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the dependency codes of a tensor among the arguments."""
        self._consulted.add(id(tensor))
        return as_dtype(self.given[id(tensor)], tensor.dtype)

    def codes(self, name: str) -> Tensor:
        """Return an argument's dependency codes; KNOWN for a Python number."""
        value = self.args[name]
        if isinstance(value, Tensor):
            return self.of(value)
        return full(KNOWN, 0, self.device)

    def plain(self, name: str) -> Tensor:
        """Return an argument's dependency codes without HIDDEN or LOWERED."""
        codes = self.codes(name)
        return plain(codes) if self.hides else codes

    def given_tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments, also those in lists."""
        args, kwargs = self.positional
        return tensors_in((*args, *kwargs.values()))

    def latest(self, tensor: Tensor) -> int:
        """Return the largest dependency code of one of these tensors."""
        return int(self._largest({id(tensor)}))

    def everything(self) -> Tensor:
        """Return the largest dependency code of all arguments."""
        self._consulted |= self.given.keys()
        return self._largest(set(self.given))

    def not_consulted(self) -> int:
        """Return the largest code of arguments whose codes the rule ignored.

        Tensors that an operation overwrites completely do not count.
        """
        left = self.given.keys() - self._consulted
        if self.name in OVERWRITTEN:
            left.discard(id(self.args.get("self")))
        return int(self._largest(left)) if left else KNOWN

    def _largest(self, ids: set[int]) -> Tensor:
        """Return the largest code of tensors with these ids.

        A tensor that is only given as `out` does not count.
        """
        if self.results:
            room = tensors_in(self.args.get(name) for name in self.results)
            read = (self.args[n] for n in self.args if n not in self.results)
            ids = ids - ({*map(id, room)} - {*map(id, tensors_in(read))})
        codes = [self.given[key] for key in ids]
        most = [plain(c).max() for c in codes if c.numel()]
        return torch.stack([full(KNOWN, 0, self.device), *most]).max()

    def value(self, name: str) -> Tensor:
        """Return an argument as it was before the operation wrote to it."""
        value = self.args[name]
        if not isinstance(value, Tensor):
            return torch.tensor(value, device=self.device)
        return self.before.get(id(value), value)

    def before_it_wrote(
        self, mark: Callable[[Tensor, Tensor], None]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were before the operation wrote.

        `mark` is called with each earlier value and its codes. Arguments that
        only provide memory for results are left out.
        """
        for key, value in self.before.items():
            mark(value, self.given[key])
        args, kwargs = tree_map(
            lambda value: self.before.get(id(value), value), self.positional
        )
        return args, {n: v for n, v in kwargs.items() if n not in self.results}

    def dtype(self, name: str) -> torch.dtype:
        """Return an argument's dtype; a number is first made a tensor."""
        value = self.args[name]
        is_tensor = isinstance(value, Tensor)
        return value.dtype if is_tensor else torch.tensor(value).dtype

    def known(self, name: str) -> bool:
        """Return whether all entries of an argument are known constants."""
        codes = self.codes(name)
        return not codes.numel() or int(codes.max()) == KNOWN

    def zeros(self, name: str, number: float = 0) -> Tensor:
        """Return where an argument is known to equal a number.

        A known NaN counts as 0: both give the same product whatever the other
        factor is. It comes from a softmax over a row that is hidden entirely.
        """
        value = self.args[name]
        if not isinstance(value, Tensor):
            return torch.tensor(value == number, device=self.device)
        codes = self.of(value)
        if not (self.special and (codes == KNOWN).any()):
            return torch.zeros_like(codes, dtype=torch.bool)
        nan = number == 0 and value.is_floating_point()
        return self.where(
            name,
            codes,
            lambda v: (v == number) | v.isnan() if nan else v == number,
        )

    def where(
        self, name: str, codes: Tensor, test: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return where an argument is a known constant that passes a test.

        `codes` are the argument's codes. To test hidden numbers as well, the
        caller sets their codes to KNOWN.
        """
        return where_known(codes, test(self.value(name)))

    def hidden(self, name: str) -> Tensor:
        """Return the places where an argument counts as minus infinity.

        A known number counts as minus infinity if it is low enough in the
        result's dtype.
        """
        codes = self.codes(name)
        hidden, dtype = is_hidden(codes), self.dtype(name)
        if not dtype.is_floating_point or not (codes == KNOWN).any():
            return hidden
        surest, out = lowest(dtype), self.out.dtype
        if out.is_floating_point:
            alone = all(self.dtype(other) != out for other in self.tensors)
            # a number of float16 does not hide scores of float32
            surest = max(surest, lowest(out)) if alone else lowest(out)
        strong = max(STRONG, surest)
        if surest > STRONG:  # float16, where scores may be as low as a mask
            surest = torch.finfo(torch.float16).min
        low = self.where(name, codes, lambda v: v <= surest)
        if bool(((codes == KNOWN) & ~low).any()):
            lower = self.where(name, codes, lambda v: v <= strong)
            if bool((lower & ~low).any()):
                values = self.value(name)
                between = values.masked_fill(values > strong, surest)
                self.note("masks", float(between.max()))
                low = lower | low
            elif (
                not low.any()
                and self.where(name, codes, lambda v: v <= WEAK).any()
            ):
                self.note("weak", float(self.value(name).min()))
        return hidden | low

    def low(self, name: str) -> Tensor:
        """Return where an argument may be low enough to hide a score.

        Large positive entries count as well.
        """
        value = self.args[name]
        dtypes = [self.out.dtype]
        dtypes += [value.dtype] if isinstance(value, Tensor) else []
        least = -STRONG
        for dtype in dtypes:
            if dtype.is_floating_point:
                least = min(least, -lowest(dtype))
        if not isinstance(value, Tensor):
            return torch.tensor(abs(value) >= least, device=self.device)
        codes = self.of(value)
        low = is_hidden(codes) | is_lowered(codes)
        if value.dtype == torch.bool or not (codes == KNOWN).any():
            return low
        return low | self.where(name, codes, lambda v: v.abs() >= least)

    @property
    def is_scaled(self) -> bool:
        """Return whether the result takes the scale of a quantised tensor."""
        if self.name not in OVERWRITTEN:
            return False
        given = self.args.get("self")
        return isinstance(given, Tensor) and given.is_quantized

    @property
    def makes_nan_finite(self) -> bool:
        """Return whether a known NaN would become a finite number."""
        if self.name == "nan_to_num":
            becomes = bool(self.get("nan", default=0))
        else:
            becomes = self.name in NAN_TO_FINITE
            becomes = becomes or "_polynomial_" in self.name
            becomes = becomes or not self.out.dtype.is_floating_point
        given = [self[name] for name in self.tensors] if becomes else []
        return any(
            bool((self.given[id(tensor)] == KNOWN).any())
            for tensor in given
            if tensor.is_floating_point() and id(tensor) in self.given
        )

    def infinite(self, name: str) -> Tensor:
        """Return the places where an argument is always minus infinity."""
        codes = self.codes(name)
        if not self.dtype(name).is_floating_point:
            return torch.zeros_like(codes, dtype=torch.bool)
        if self.hides:
            hidden = is_hidden(codes) & ~is_lowered(codes)
            codes = codes.masked_fill(hidden, KNOWN)
        return self.where(name, codes, lambda v: v == -math.inf)

    def is_low(self) -> bool:
        """Return whether any entry of an argument may hide a score."""
        return self.special and any(
            bool(self.low(name).any())
            for name in self.terms
            if name not in IDS
        )
