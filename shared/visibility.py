"""Declare which tokens the scores of a position may depend on.

A declaration is a predicate of a query and a key, like FlexAttention's
mask_mod: `(q, kv)` or `(b, h, q, kv)`, true if position q may depend on token
kv. This module has declarations for common kinds of attention, for example for
`check_model(..., sees=window(64, layers=2))`. Your own function works as well:

    def mask_mod(b, h, q, kv):
        return (kv <= q) | (kv < 5)

A predicate may depend on the tokens of a text: then `sees(tokens)` returns
the predicate for the ids of that text.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Relation = Bool[Tensor, "time time"]  # [q, kv]: whether q may see kv
Sees = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Visibility:
    """A declaration of visibility, with a name.

    Attributes:
        name: the expression that makes the declaration, such as "window(64)".
        relation_of: takes a number of tokens, and returns the boolean matrix
            of which position may see which.
        of_pair: a formula of two tensors, q and kv, that says whether q may
            see kv. None if there is only `relation_of`.
    """

    name: str
    relation_of: Callable[[int], Relation]
    of_pair: Sees | None = None

    @property
    def mask_mod(self) -> Callable[[Any, Any, Any, Any], Any]:
        """Return the function of (b, h, q, kv) that create_block_mask takes.

        Raises:
            ValueError: if the declaration is a table, not a formula.
        """
        of_pair = self.of_pair
        if of_pair is None:
            raise ValueError(
                f"{self.name} is a table: use table = relation_of(time), and "
                f"lambda b, h, q, kv: table[q, kv]"
            )
        return lambda b, h, q, kv: of_pair(q, kv)

    def __call__(self, first: Any, second: Any, *others: Any) -> Any:
        """Return whether q may see kv, as FlexAttention's mask_mod does.

        The arguments are numbers or tensors.

        Args:
            first: q, or b.
            second: kv, or h.
            *others: q and kv, if the first two are b and h.
        """
        *_, query, key = first, second, *others
        if self.of_pair is not None:
            return self.of_pair(torch.as_tensor(query), torch.as_tensor(key))
        both = torch.as_tensor(query), torch.as_tensor(key)
        time = 1 + max(int(index.max()) for index in both)
        return self.relation_of(time).to(both[0].device)[both]


def _places(time: int) -> tuple[Int[Tensor, "time 1"], Int[Tensor, "1 time"]]:
    at = torch.arange(time)
    return at[:, None], at[None, :]


def _of_pairs(name: str, sees: Sees) -> Visibility:
    """Return a declaration from a formula of two tensors, q and kv."""
    return Visibility(name, lambda time: sees(*_places(time)), sees)


causal = _of_pairs("causal", lambda q, kv: kv <= q)


def prefix(count: int) -> Visibility:
    """Return causal attention in which all tokens see the first `count`."""
    _require("a prefix", count)
    return _of_pairs(
        f"prefix({count})", lambda q, kv: (kv <= q) | (kv < count)
    )


def window(size: int, layers: int = 1) -> Visibility:
    """Return causal attention to the current token and `size` - 1 before it.

    Args:
        size: number of tokens that a layer sees.
        layers: number of the model's layers, because more layers see further
            back.
    """
    _require("a window", size)
    _require("layers of a window", layers)
    reach = layers * (size - 1)
    more = f", layers={layers}" * (layers > 1)
    return _of_pairs(
        f"window({size}{more})",
        lambda q, kv: (kv <= q) & (q - kv <= reach),
    )


def chunked(size: int) -> Visibility:
    """Return causal attention within chunks of `size` tokens."""
    _require("a chunk", size)
    return _of_pairs(
        f"chunked({size})",
        lambda q, kv: (kv <= q) & (q // size == kv // size),
    )


def blocks(spans: Iterable[tuple[int, int]]) -> Visibility:
    """Return causal attention in which the tokens of a block see each other.

    Args:
        spans: start and end (exclusive) of each block, such as an image.
    """
    known = [(int(start), int(end)) for start, end in spans]
    for start, end in known:
        if not 0 <= start < end:
            raise ValueError(
                f"a span must start at 0 or later and end after its start, "
                f"got ({start}, {end})"
            )

    def sees(q: Tensor, kv: Tensor) -> Tensor:
        found = kv <= q
        for start, end in known:
            inside = [(at >= start) & (at < end) for at in (q, kv)]
            found = found | (inside[0] & inside[1])
        return found

    return _of_pairs(f"blocks({_in_short(known)})", sees)


def documents(lengths: Sequence[int]) -> Visibility:
    """Return causal attention within the documents of a packed row.

    Args:
        lengths: number of tokens of each document; further tokens belong to
            the last one.
    """
    for length in lengths:
        _require("a document", length)
    ends = [*accumulate(lengths)][:-1]

    def sees(q: Tensor, kv: Tensor) -> Tensor:
        found = kv <= q
        for end in ends:  # q and kv must be on the same side of each end
            found = found & ((q < end) == (kv < end))
        return found

    return _of_pairs(f"documents({_in_short([*lengths])})", sees)


def tree(parents: Sequence[int]) -> Visibility:
    """Return attention in which each token sees its ancestors and itself.

    Args:
        parents: for each token, the number of its parent, an earlier token of
            its branch. For a root, -1 or its own number. The parent of a token
            without an entry is the token before it.
    """
    known = [int(parent) for parent in parents]
    for at, parent in enumerate(known):
        if not -1 <= parent <= at:
            raise ValueError(
                f"the parent of token {at} must be an earlier token, -1 or "
                f"{at}, got {parent}"
            )

    def relation(time: int) -> Relation:
        found = torch.eye(time, dtype=torch.bool)
        for at in range(time):
            parent = known[at] if at < len(known) else at - 1
            if 0 <= parent < at:
                found[at] |= found[parent]
        return found

    return Visibility(f"tree({_in_short(known)})", relation)


def through(sees: Sees, layers: int) -> Visibility:
    """Return what positions see through several layers with the same mask."""
    _require("layers", layers)

    def relation(time: int) -> Relation:
        one = relation_of(sees, time).float()
        found = torch.eye(time)
        for _ in range(layers):
            found = (found @ one > 0).float()
        return found.bool()

    return Visibility(f"through({name_of(sees)}, {layers})", relation)


def _in_short(given: list[Any]) -> str:
    """Return a list for a message, or the length of a long list."""
    return str(given) if len(given) < FEW else f"{len(given)} of them"


FEW = 7  # most entries of a list that a message shows


def _require(what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{what} must be a number of at least 1, got {count}")


# --- Reading a declaration ---------------------------------------------------


def name_of(sees: Sees) -> str:
    """Return the name of a declaration for messages."""
    known = getattr(sees, "name", None) or getattr(sees, "__name__", None)
    return str(known or type(sees).__name__)


def takes_tokens(sees: Sees) -> bool:
    """Return whether a declaration is a function of the tokens of a text."""
    return not isinstance(sees, Visibility) and _count(sees) == 1


def relation_of(
    sees: Sees, time: int, tokens: Int[Tensor, "time"] | None = None
) -> Relation:
    """Return which tokens the scores of each position may depend on.

    Args:
        sees: the declaration.
        time: the number of tokens.
        tokens: ids of the text, for a declaration that depends on them.

    Raises:
        ValueError: if the declaration is not a predicate of two positions.
    """
    if isinstance(sees, Visibility):
        return sees.relation_of(time)
    if takes_tokens(sees):
        if tokens is None:
            raise ValueError(
                f"{name_of(sees)} depends on the tokens of a text, but none "
                f"were given"
            )
        found = sees(tokens)
        if not callable(found) or takes_tokens(found):
            raise ValueError(
                f"{name_of(sees)} takes the tokens of a text, so it must "
                f"return a predicate (q, kv), got {type(found).__name__}"
            )
        return relation_of(found, time)
    count = _count(sees)
    if count not in (2, 4):
        raise ValueError(
            f"sees must take (q, kv) or (b, h, q, kv), but {name_of(sees)} "
            f"takes {count} arguments"
        )
    if count == 2:
        return _read(sees, (), time)
    found = _read(sees, (0, 0), time)
    for at, what in enumerate(("row b", "head h")):
        with suppress(Exception):  # its tables may have only row 0 or head 0
            other = _read(sees, (int(at == 0), int(at == 1)), time)
            found = found if other.equal(found) else torch.empty(0)
        if not len(found):
            raise ValueError(
                f"{name_of(sees)} depends on the {what} at {time} tokens: a "
                f"declaration must be the same for all of them"
            )
    return found


class _Place(Tensor):
    """A position that raises an error when a set looks it up."""

    def __hash__(self) -> int:
        raise TypeError("a predicate that uses a set takes numbers")


def _read(sees: Sees, before: tuple[int, ...], time: int) -> Relation:
    """Return the matrix of a predicate, which may take b and h first."""
    query, key = (at.expand(time, time) for at in _places(time))
    given = *map(torch.tensor, before), query, key
    try:  # call the predicate with tensors, as FlexAttention does
        found = sees(*(one.as_subclass(_Place) for one in given))
        found = torch.as_tensor(found).as_subclass(Tensor).expand(time, time)
    except Exception:  # it may take only numbers, as `q and kv` does
        pairs = ((*before, q, k) for q in range(time) for k in range(time))
        each = [_answer(sees, pair) for pair in pairs]
        return torch.tensor(each).view(time, time)
    if found.dtype != torch.bool:
        raise ValueError(
            f"{name_of(sees)} returns {found.dtype}: a predicate must return "
            f"booleans"
        )
    return found.cpu().clone()


def _answer(sees: Sees, pair: tuple[int, ...]) -> bool:
    """Call a predicate that takes numbers, and return its boolean."""
    try:
        found = sees(*pair)
    except Exception as error:
        raise ValueError(
            f"{name_of(sees)}{pair} raises {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    with suppress(Exception):
        one = torch.as_tensor(found)
        if one.dtype == torch.bool and one.numel() == 1:
            return bool(one)
    raise ValueError(
        f"{name_of(sees)}{pair} returns {' '.join(repr(found).split())[:40]}: "
        f"a predicate must return a boolean"
    )


def _count(sees: Sees) -> int:
    try:
        parameters = inspect.signature(sees).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(
            f"the arguments of {name_of(sees)} are not known: give a function "
            f"of (q, kv)"
        ) from None
    usual = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return sum(
        p.kind in usual and p.default is inspect.Parameter.empty
        for p in parameters
    )


def _numbers(function: Any) -> Iterator[int]:
    """Yield the whole numbers that a function can use.

    They are in the function's code and in functions inside it, in globals,
    closures and defaults that it uses, and in the attributes of an object.
    """
    seen, left = set[int](), [function]
    while left:
        value = left.pop()
        if type(value) is int:
            yield value
        if id(value) in seen or isinstance(value, ModuleType | type):
            continue
        seen.add(id(value))
        if isinstance(value, CodeType):
            left += value.co_consts
        elif isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, tuple | list | set | frozenset):
            left += value
        elif isinstance(value, Tensor):
            few = value.numel() <= FEW and not value.is_floating_point()
            left += value.flatten().tolist() if few else ()
        elif isinstance(value, partial):
            left += [value.func, value.args, value.keywords]
        elif isinstance(value, FunctionType):
            left += _held_by(value)
        elif value is function:  # an object that can be called
            left += [getattr(value, "__dict__", {}), type(value).__call__]


def _held_by(function: FunctionType) -> Iterator[Any]:
    """Yield the code of a function, and the values that it can reach."""
    code = function.__code__
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    names = {name for one in (code, *inner) for name in one.co_names}
    yield code
    yield from (function.__defaults__ or (), function.__kwdefaults__ or {})
    yield from (function.__globals__.get(name) for name in names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the closure's cell is empty
            yield cell.cell_contents


@dataclass(frozen=True)
class Declared:
    """A declaration of visibility, with its matrices for lengths used so far.

    Attributes:
        sees: the declaration.
        longest: number of tokens of the longest text.
    """

    sees: Sees
    longest: int = 33
    _kept: dict[int, Relation] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Return the declaration's name for messages."""
        return name_of(self.sees)

    @cached_property
    def looks_ahead(self) -> bool:
        """Return whether a position may see a later one, at some lengths."""
        if takes_tokens(self.sees):
            return True
        each = (relation_of(self.sees, n) for n in _sampled(self.longest))
        return any(bool(relation.triu(1).any()) for relation in each)

    def ids(self, vocab_size: int) -> list[int]:
        """Return the ids on which a declaration that reads ids may depend."""
        if not takes_tokens(self.sees):
            return []
        return sorted({*_numbers(self.sees)} & {*range(vocab_size)})

    def of(self, tokens: Int[Tensor, "rows time"]) -> Bool[Tensor, "r t t"]:
        """Return for each row of a batch which position may see which."""
        rows, time = tokens.shape
        if takes_tokens(self.sees):
            each = [relation_of(self.sees, time, row) for row in tokens.cpu()]
            return torch.stack(each)
        if time not in self._kept:
            self._kept[time] = relation_of(self.sees, time)
        return self._kept[time].expand(rows, time, time)


SAMPLED = (1, 2, 3, 7, 16, 33)  # lengths at which a declaration is tested
LONG = 4096  # longest length at which a declaration is tested


def _sampled(longest: int) -> set[int]:
    return {min(n, longest) for n in (*SAMPLED, LONG)}


def declared_by(sees: Any, block_size: int) -> Declared | None:
    """Return a declaration, or None for the usual causal one.

    Raises:
        ValueError: if the declaration is not a predicate of two positions.
    """
    if sees is None or sees is causal:
        return None
    if not callable(sees):
        raise ValueError(
            f"sees must be a predicate (q, kv), such as those of "
            f"gpt_duet.visibility, got {sees!r:.60}"
        )
    declared = Declared(sees, block_size)
    if takes_tokens(sees):
        for time in {min(n, block_size) for n in SAMPLED}:
            declared.of(torch.zeros(1, time, dtype=torch.int64))
        return declared
    found = [relation_of(sees, time) for time in _sampled(block_size)]
    usual = all(one.equal(causal.relation_of(len(one))) for one in found)
    return None if usual and block_size <= LONG else declared
