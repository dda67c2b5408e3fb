"""Who may see whom: which tokens the scores of a position may depend on.

A declaration is a predicate of a query and a key, as FlexAttention's
mask_mod: `(q, kv)` or `(b, h, q, kv)`, true where position q may depend on
token kv. Those below are ready; `check_model(..., sees=window(64, layers=2))`
checks a model by one, and so does any function of yours:

    def mask_mod(b, h, q, kv):
        return (kv <= q) | (kv < 5)

A predicate may depend on the tokens of a text: `sees(tokens)` then returns
the predicate, for the ids of that text.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Relation = Bool[Tensor, "time time"]  # [q, kv]: whether q may see kv
Sees = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Visibility:
    """A declaration with a name.

    Attributes:
        name: as a reader would write it: "window(64)".
        relation_of: from the number of tokens to the relation.
    """

    name: str
    relation_of: Callable[[int], Relation]

    def __call__(self, first: Any, second: Any, *others: Any) -> Any:
        """Return whether q may see kv, as FlexAttention's mask_mod.

        Args:
            first: q, or b.
            second: kv, or h.
            *others: q and kv, after b and h: numbers or tensors.
        """
        *_, query, key = first, second, *others
        both = torch.as_tensor(query), torch.as_tensor(key)
        time = 1 + max(int(index.max()) for index in both)
        return self.relation_of(time).to(both[0].device)[both]


def _places(time: int) -> tuple[Int[Tensor, "time 1"], Int[Tensor, "1 time"]]:
    at = torch.arange(time)
    return at[:, None], at[None, :]


def _of_pairs(sees: Sees) -> Callable[[int], Relation]:
    """Return the relation of a predicate (q, kv) of tensors."""
    return lambda time: sees(*_places(time))


_causal = _of_pairs(lambda q, kv: kv <= q)
causal = Visibility("causal", _causal)


def prefix(count: int) -> Visibility:
    """Return causal attention in which all see the first `count` tokens."""
    _require("a prefix", count)
    relation = _of_pairs(lambda q, kv: (kv <= q) | (kv < count))
    return Visibility(f"prefix({count})", relation)


def window(size: int, layers: int = 1) -> Visibility:
    """Return causal attention to the last `size` tokens, its own included.

    Args:
        size: tokens that a layer sees.
        layers: of the model: what two of them see reaches further back.
    """
    _require("a window", size)
    _require("layers of a window", layers)
    reach = layers * (size - 1)
    relation = _of_pairs(lambda q, kv: (kv <= q) & (q - kv <= reach))
    more = f", layers={layers}" * (layers > 1)
    return Visibility(f"window({size}{more})", relation)


def chunked(size: int) -> Visibility:
    """Return causal attention within chunks of `size` tokens."""
    _require("a chunk", size)
    relation = _of_pairs(lambda q, kv: (kv <= q) & (q // size == kv // size))
    return Visibility(f"chunked({size})", relation)


def blocks(spans: Iterable[tuple[int, int]]) -> Visibility:
    """Return causal attention in which tokens of a span see each other.

    Args:
        spans: where each block of an image starts and ends (exclusive).
    """
    known = [(int(start), int(end)) for start, end in spans]
    for start, end in known:
        if not 0 <= start < end:
            raise ValueError(
                f"a span starts at 0 or later and ends after that, got "
                f"({start}, {end})"
            )

    def relation(time: int) -> Relation:
        query, key = _places(time)
        found = key <= query
        for start, end in known:
            inside = [(at >= start) & (at < end) for at in (query, key)]
            found = found | (inside[0] & inside[1])
        return found

    return Visibility(f"blocks({_in_short(known)})", relation)


def documents(lengths: Sequence[int]) -> Visibility:
    """Return causal attention within documents that lie in one row.

    Args:
        lengths: tokens of each; what follows the last one belongs to it.
    """
    for length in lengths:
        _require("a document", length)
    ends = torch.tensor([*lengths]).cumsum(0)[:-1]

    def relation(time: int) -> Relation:
        of = torch.bucketize(torch.arange(time), ends, right=True)
        return _causal(time) & (of[:, None] == of[None, :])

    return Visibility(f"documents({_in_short([*lengths])})", relation)


def tree(parents: Sequence[int]) -> Visibility:
    """Return attention of each token to its ancestors and itself.

    Args:
        parents: the token before each one in its branch, a smaller number;
            -1 or its own number for a root. Tokens after these follow one
            another.
    """
    known = [int(parent) for parent in parents]
    for at, parent in enumerate(known):
        if not -1 <= parent <= at:
            raise ValueError(
                f"the parent of token {at} is an earlier token, -1 or {at}, "
                f"got {parent}"
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
    """Return what layers may see on top of one another."""
    _require("layers", layers)

    def relation(time: int) -> Relation:
        one = relation_of(sees, time).float()
        found = torch.eye(time)
        for _ in range(layers):
            found = (found @ one > 0).float()
        return found.bool()

    return Visibility(f"through({name_of(sees)}, {layers})", relation)


def _in_short(given: list[Any]) -> str:
    """Return a list as a message gives it: a long one as its size."""
    return str(given) if len(given) < FEW else f"{len(given)} of them"


FEW = 7  # entries of a list that a message shows


def _require(what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{what} must be a number of at least 1, got {count}")


# --- Reading a declaration ---------------------------------------------------


def name_of(sees: Sees) -> str:
    """Return the name of a declaration as a message gives it."""
    known = getattr(sees, "name", None) or getattr(sees, "__name__", None)
    return str(known or type(sees).__name__)


def takes_tokens(sees: Sees) -> bool:
    """Whether a declaration is a function of the tokens of a text."""
    return not isinstance(sees, Visibility) and _count(sees) == 1


def relation_of(
    sees: Sees, time: int, tokens: Int[Tensor, "time"] | None = None
) -> Relation:
    """Return which tokens the scores of each position may depend on.

    Args:
        sees: the declaration.
        time: the number of tokens.
        tokens: of the text, for a declaration that depends on them.

    Raises:
        ValueError: for what is not a predicate of two positions.
    """
    if isinstance(sees, Visibility):
        return sees.relation_of(time)
    if takes_tokens(sees):
        if tokens is None:
            raise ValueError(
                f"{name_of(sees)} depends on the tokens of a text, and none "
                f"is given"
            )
        found = sees(tokens)
        if not callable(found) or takes_tokens(found):
            raise ValueError(
                f"{name_of(sees)} takes the tokens of a text, so it returns "
                f"a predicate (q, kv), got {type(found).__name__}"
            )
        return relation_of(found, time)
    count = _count(sees)
    if count not in (2, 4):
        raise ValueError(
            f"sees takes (q, kv) or (b, h, q, kv), and {name_of(sees)} takes "
            f"{count} arguments"
        )
    if count == 2:
        return _read(sees, (), time)
    found = _read(sees, (0, 0), time)
    for at, what in enumerate(("row b", "head h")):
        with suppress(Exception):  # its tables may have one row
            other = _read(sees, (int(at == 0), int(at == 1)), time)
            found = found if other.equal(found) else torch.empty(0)
        if not len(found):
            raise ValueError(
                f"{name_of(sees)} depends on the {what} at {time} tokens: a "
                f"declaration says what all of them may see"
            )
    return found


class _Place(Tensor):
    """A position that no set can look up: a tensor would never be in it."""

    def __hash__(self) -> int:
        raise TypeError("a predicate that asks a set is one of numbers")


def _read(sees: Sees, before: tuple[int, ...], time: int) -> Relation:
    """Return the relation of a predicate, with b and h before q and kv."""
    query, key = (at.expand(time, time) for at in _places(time))
    given = *map(torch.tensor, before), query, key
    try:  # as FlexAttention calls it, with tensors
        found = sees(*(one.as_subclass(_Place) for one in given))
        found = torch.as_tensor(found).as_subclass(Tensor).expand(time, time)
    except Exception:  # it was written for numbers: `q and kv`
        pairs = ((*before, q, k) for q in range(time) for k in range(time))
        each = [_answer(sees, pair) for pair in pairs]
        return torch.tensor(each).view(time, time)
    if found.dtype != torch.bool:
        raise ValueError(
            f"{name_of(sees)} returns {found.dtype}: a predicate returns "
            f"booleans"
        )
    return found.cpu().clone()


def _answer(sees: Sees, pair: tuple[int, ...]) -> bool:
    """Return what a predicate of numbers says of a pair."""
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
        f"a predicate returns a boolean"
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
    """Yield the whole numbers that a function can name.

    They stand in its code and the functions inside it, in names that it looks
    up, in what it closes over and is given, and in attributes of an object.
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
        elif value is function:  # an object that is called
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
        with suppress(ValueError):  # it is still empty
            yield cell.cell_contents


@dataclass(frozen=True)
class Declared:
    """A declaration, with the relations of texts that were asked for.

    Attributes:
        sees: the declaration.
        longest: tokens of the longest text.
    """

    sees: Sees
    longest: int = 33
    _kept: dict[int, Relation] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return name_of(self.sees)

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether some position may see a later token, as far as is known."""
        if takes_tokens(self.sees):
            return True
        each = (relation_of(self.sees, n) for n in _sampled(self.longest))
        return any(bool(relation.triu(1).any()) for relation in each)

    def ids(self, vocab_size: int) -> list[int]:
        """Return the ids that a declaration by tokens may ask for."""
        if not takes_tokens(self.sees):
            return []
        return sorted({*_numbers(self.sees)} & {*range(vocab_size)})

    def of(self, tokens: Int[Tensor, "rows time"]) -> Bool[Tensor, "r t t"]:
        """Return the relation of each row of a batch."""
        rows, time = tokens.shape
        if takes_tokens(self.sees):
            each = [relation_of(self.sees, time, row) for row in tokens.cpu()]
            return torch.stack(each)
        if time not in self._kept:
            self._kept[time] = relation_of(self.sees, time)
        return self._kept[time].expand(rows, time, time)


SAMPLED = (1, 2, 3, 7, 16, 33)  # lengths at which a declaration is looked at
LONG = 4096  # tokens of the longest one


def _sampled(longest: int) -> set[int]:
    return {min(n, longest) for n in (*SAMPLED, LONG)}


def declared_by(sees: Any, block_size: int) -> Declared | None:
    """Return a declaration; None for the usual one, causal.

    Raises:
        ValueError: for what is not a predicate of two positions.
    """
    if sees is None or sees is causal:
        return None
    if not callable(sees):
        raise ValueError(
            f"sees is a predicate (q, kv), as gpt_duet.visibility has some, "
            f"got {sees!r:.60}"
        )
    declared = Declared(sees, block_size)
    if takes_tokens(sees):
        for time in {min(n, block_size) for n in SAMPLED}:
            declared.of(torch.zeros(1, time, dtype=torch.int64))
        return declared
    found = [relation_of(sees, time) for time in _sampled(block_size)]
    usual = all(one.equal(_causal(len(one))) for one in found)
    return None if usual and block_size <= LONG else declared
