"""Orders that together forbid what a declaration of visibility forbids.

Codes are ranks in an order, and a score may depend on those up to its bound.
One order is enough where the rows of a relation are nested along it: causal,
or a prefix. The forbidden pairs of any relation are a union of such: a window
or documents need two orders, a tree some more.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..visibility import Declared, takes_tokens
from .codes import CODES
from .engine import Codes, Order, Tokens

Forbidden = Bool[Tensor, "time time"]
Early = Bool[Tensor, "rows time"]  # tokens that positions before them see
Chain = tuple[Int[Tensor, "time"], Int[Tensor, "time"]]  # codes, bounds


class Chains:
    """The orders in which a model with a declaration is followed."""

    def __init__(self, declared: Declared):
        self.declared = declared
        # by rows, length, and the ids where the relation depends on them
        self._kept: dict[tuple[int, int, bytes], tuple[Order, ...]] = {}

    def orders(self, tokens: Tokens) -> tuple[Order, ...]:
        """Return the orders for a batch of texts."""
        rows, time = tokens.shape
        own = takes_tokens(self.declared.sees)  # each row has a relation
        key = rows, time, tokens.cpu().numpy().tobytes() if own else b""
        if key not in self._kept:
            relations = self.declared.of(tokens if own else tokens[:1])
            each = [[*chains_of(~relation)] for relation in relations]
            early = [relation.triu(1).any(0) for relation in relations]
            if not own:
                each, early = each * rows, early * rows
            self._kept[key] = _orders(each, torch.stack(early))
        return self._kept[key]


def _orders(each: list[list[Chain]], early: Early) -> tuple[Order, ...]:
    """Return the orders of a batch whose rows have these chains."""
    time = early.size(1)
    idle = torch.zeros(time, dtype=torch.int64)
    count = max([1, *map(len, each)])
    padded = [[*row, *[(idle, idle)] * (count - len(row))] for row in each]
    return tuple(_order([*some], early) for some in zip(*padded, strict=True))


def _order(rows: list[Chain], early: Early) -> Order:
    """Return the order of a batch whose rows have these codes and bounds.

    A target is the next token. Where positions before that token may see it,
    what they should predict is another one, which is in no text: no score may
    depend on it.
    """
    codes, bounds = (
        torch.stack([row[k] for row in rows]).to(CODES) for k in (0, 1)
    )
    end = torch.full_like(codes[:, :1], codes.size(1))  # after all tokens
    following = codes[:, 1:].masked_fill(early[:, 1:], codes.size(1))
    targets = torch.cat([following, end], 1)

    def some(values: Codes) -> Callable[[int, int], Codes]:
        return lambda rows, time: values[:rows, :time]

    of_targets = some(targets)
    return Order("positions", some(codes), 0, False, some(bounds), of_targets)


def chains_of(forbidden: Forbidden) -> Iterator[Chain]:
    """Yield codes and bounds that together forbid these pairs, no others."""
    time = len(forbidden)
    left, rising = forbidden.clone(), torch.arange(time)
    for order in (rising, rising.flip(0)):
        codes, bounds, covered = _nested(forbidden, order)
        if bool((covered & left).any()):
            yield codes, bounds
            left &= ~covered
    while bool(left.any()):
        most = int(left.sum(1).argmax())
        # what few may see comes last, after what this position may see
        rank = forbidden[most].long() * (time + 1) + forbidden.sum(0)
        codes, bounds, covered = _nested(forbidden, rank.argsort(stable=True))
        yield codes, bounds
        left &= ~covered


def _nested(
    forbidden: Forbidden, order: Int[Tensor, "time"]
) -> tuple[Int[Tensor, "time"], Int[Tensor, "time"], Forbidden]:
    """Return the part of a relation that is nested along an order.

    Each key has its rank as its code. The bound of a query is the rank of the
    last key that it may see: all later ones are forbidden to it.
    """
    time = len(forbidden)
    codes = torch.empty(time, dtype=torch.int64)
    codes[order] = torch.arange(time)
    seen = (~forbidden).long() * (codes + 1)
    bounds = seen.amax(1) - 1
    return codes, bounds, codes[None, :] > bounds[:, None]
