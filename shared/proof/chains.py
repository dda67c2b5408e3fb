"""Find the token orders in which a declared visibility is proved.

A model may declare which tokens each position sees (visibility.py). An order
ranks the tokens, and a token's code is its rank. A position's score may depend
only on tokens up to the position's bound.

One order is enough for a causal mask, or for a prefix. A sliding window or
documents need two orders, and a tree needs more. Together the orders forbid
exactly the pairs that the declaration forbids.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..visibility import Declared, takes_tokens
from .codes import CODES
from .engine import Codes, Order, Tokens

Forbidden = Bool[Tensor, "time time"]
Early = Bool[Tensor, "rows time"]  # tokens that an earlier position may see
Chain = tuple[Int[Tensor, "time"], Int[Tensor, "time"]]  # codes, bounds


class Chains:
    """The orders in which a declared visibility is proved."""

    def __init__(self, declared: Declared):
        self.declared = declared
        # keys: rows, length, and the ids if the relation depends on them
        self._kept: dict[tuple[int, int, bytes], tuple[Order, ...]] = {}

    def orders(self, tokens: Tokens) -> tuple[Order, ...]:
        """Return the orders for a batch of texts."""
        rows, time = tokens.shape
        # whether the ids of a row decide what its positions see
        own = takes_tokens(self.declared.sees)
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
    """Return the orders of a batch; each consists of one chain per row."""
    time = early.size(1)
    idle = torch.zeros(time, dtype=torch.int64)
    count = max([1, *map(len, each)])
    padded = [[*row, *[(idle, idle)] * (count - len(row))] for row in each]
    return tuple(_order([*some], early) for some in zip(*padded, strict=True))


def _order(rows: list[Chain], early: Early) -> Order:
    """Return the order of a batch, given the chain of each row.

    A target is the next token. If an earlier position may see that token, no
    score may depend on the target. Its code is then larger than any token's.
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
    """Yield chains that together forbid exactly the `forbidden` pairs."""
    time = len(forbidden)
    left, rising = forbidden.clone(), torch.arange(time)
    for order in (rising, rising.flip(0)):
        codes, bounds, covered = _nested(forbidden, order)
        if bool((covered & left).any()):
            yield codes, bounds
            left &= ~covered
    while bool(left.any()):
        most = int(left.sum(1).argmax())
        # first the keys that this query sees; among those, the most seen ones
        rank = forbidden[most].long() * (time + 1) + forbidden.sum(0)
        codes, bounds, covered = _nested(forbidden, rank.argsort(stable=True))
        yield codes, bounds
        left &= ~covered


def _nested(
    forbidden: Forbidden, order: Int[Tensor, "time"]
) -> tuple[Int[Tensor, "time"], Int[Tensor, "time"], Forbidden]:
    """Return codes and bounds for an order, and the pairs they forbid.

    The code of a key is its rank. The bound of a query is the rank of the last
    key that it may see. All later keys are forbidden.
    """
    time = len(forbidden)
    codes = torch.empty(time, dtype=torch.int64)
    codes[order] = torch.arange(time)
    seen = (~forbidden).long() * (codes + 1)
    bounds = seen.amax(1) - 1
    return codes, bounds, codes[None, :] > bounds[:, None]
