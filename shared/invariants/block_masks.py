"""FlexAttention's block masks, held against their mask_mod.

Eager FlexAttention asks mask_mod of each pair. The compiled kernel asks it in
partial blocks alone: a full block is visible as a whole, a block that is not
listed is not seen. So a mask whose lists say anything else is two functions.
"""

import sys
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from .cases import EVAL, TRAIN
from .flex import flex_as_written
from .operations import Operations
from .places import Place, find_place
from .stances import FLEX
from .subject import Subject
from .variant import own

MOST = 1 << 26  # pairs of a mask: of a larger one the first row and head
SHORT = 5  # tokens of the text that shows whether there are masks
WHOLE = 1 << 29  # a block this large is what torch puts for no mask


def require_true_blocks(subject: Subject) -> str:
    """Hold each mask against its mask_mod; return what was looked at.

    Raises:
        AssertionError: names the lines, the block and the first pair.
    """
    if FLEX not in sys.modules or not subject.is_module:
        return ""
    seen, longest = _Masks(), subject.block_size
    with flex_as_written():
        variant = own(subject)

        def look(*lengths: int) -> None:
            for time, case in product(subject.fit(*lengths), (EVAL, TRAIN)):
                if time > longest or time in seen.lengths[case.mode]:
                    continue
                with subject.budget.part("block masks", time, 1 / 6):
                    seen.lengths[case.mode].append(time)
                    rows = subject.fit_rows(2)
                    with seen:
                        variant.run_as(case).scores(subject.draw(rows, time))
                    if seen.untrue:
                        raise AssertionError(seen.untrue)

        look(SHORT)
        # some models make masks for long texts alone
        if seen.sizes or not subject.takes_seconds(longest):
            look(longest)
        for size in sorted(seen.sizes):
            look(size - 1, size, size + 1, 2 * size)
    if not seen.sizes:
        return ""
    lengths = ", ".join(map(str, sorted(seen.lengths[EVAL.mode])))
    return f"the lists of each BlockMask match its mask_mod at {lengths}"


class _Masks(Operations):
    """Looks at the mask of each flex_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()  # of blocks
        self.untrue = ""  # how a mask's lists contradict its mask_mod
        self.lengths: dict[str, list[int]] = {
            case.mode: [] for case in (EVAL, TRAIN)
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "flex_attention":
            *_, size, other, _ = args[4]
            if max(size, other) < WHOLE:
                self.sizes |= {size, other}
                self.untrue = self.untrue or _untrue(args[0], args[1], args[4])
        return func(*args, **(kwargs or {}))


def _untrue(query: Tensor, key: Tensor, blocks: tuple[Any, ...]) -> str:
    """Return how a mask's lists contradict its mask_mod, or ""."""
    *_, high, wide, mask_mod = blocks
    rows, heads, tall, long = *query.shape[:2], query.size(2), key.size(2)
    if rows * heads * tall * long > MOST:
        rows = heads = 1
    flex: Any = sys.modules[FLEX]
    shown = flex.create_mask(mask_mod, rows, heads, tall, long, query.device)
    partial = _listed(blocks[2], blocks[3])[:rows, :heads]
    full = torch.zeros_like(partial)
    if blocks[4] is not None:
        full = _listed(blocks[4], blocks[5])[:rows, :heads]

    def pairs(where: Bool[Tensor, "rows heads down across"]) -> Tensor:
        """Return for each pair whether its block is one of these."""
        spread = where.repeat_interleave(high, 2).repeat_interleave(wide, 3)
        return spread[:, :, :tall, :long]

    place, at = getattr(blocks[2], "made", (None, False))[0], find_place("")
    for wrong, words in (
        (
            pairs(full) & ~shown,
            "is listed as full, and mask_mod hides position {1} from {0}: the "
            "compiled kernel does not ask it there, and lets {0} see {1}",
        ),
        (
            ~(pairs(full) | pairs(partial)) & shown,
            "is left out, and mask_mod shows position {1} to {0}: the "
            "compiled kernel does not let {0} see {1}, the eager one does",
        ),
    ):
        found = wrong.nonzero()
        if not len(found):
            continue
        later = found[found[:, 3] > found[:, 2]]
        one, other = [*later, *found[:1]][0][2:].tolist()
        return (
            f"the BlockMask of {at}{_made(place)} is not its mask_mod: block "
            f"({one // high}, {other // wide}) of {high} x {wide} "
            f"{words.format(one, other)} (length {tall})"
        )
    return ""


def _made(place: Place | None) -> str:
    return "" if place is None else f", made at {place},"


def _listed(
    count: Tensor, index: Tensor
) -> Bool[Tensor, "rows heads down across"]:
    """Return which blocks of a row are among the first of its list.

    A mask that was cut from a longer one may list blocks behind its end.
    """
    among = torch.arange(index.size(-1), device=index.device)
    among = among < count.unsqueeze(-1)
    width = max(index.size(-1), int(index.max()) + 1)
    times = torch.zeros(*index.shape[:-1], width, dtype=torch.long)
    times = times.to(index.device)
    return times.scatter_add_(-1, index.long(), among.long()) > 0
