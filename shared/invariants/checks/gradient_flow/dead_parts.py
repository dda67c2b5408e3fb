"""Find rows, columns and entries of parameters that no score depends on.

A slice is a row, a column or an entry. A dead slice gets no gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ....running.errors import ModelRaised
from ....running.model.sizes import WINDOW, declared
from ....running.operations import operations_through
from ....running.rounding import differ
from ....running.subject import Subject
from ....running.variant import Variant, changeable, redraw_zeros
from ....running.ways import TRAIN

# a parameter's name, with 0 for its rows, 1 for its columns, or ENTRIES for
# its entries
Axis = tuple[str, int]
# for each axis: whether each slice has a gradient
Slices = dict[Axis, Bool[Tensor, "_"]]

Collect = Callable[[Variant, dict[int, int], Slices], object]

ENTRIES = -1  # instead of an axis: each slice is one entry
# a table with at most so many entries is judged entry by entry
TABLE_NUMBERS = 64
FEWEST = 2  # fewest dead slices that are a fault: one may be padding
# how often all matrices are redrawn, to revive slices that are dead by chance
DRAWS = 4
LONG = 256  # most tokens of a heavy model's texts
LEAST = 4  # fewest slices of an axis, and fewest tokens of a text, to judge
# largest share of slices that a table of distance buckets may leave unread
IDLE = 1 / 3
# operations that choose experts by tokens
ROUTES = ("topk", "sort", "argmax", "nonzero")

# operations that read a table, with functions that find axes and indices
READERS: dict[str, Callable[[tuple], Iterable[tuple[int, Any]]]] = {
    "embedding": lambda args: [(0, args[1])],
    "index": lambda args: enumerate(args[1]),
    "index_select": lambda args: [args[1:3]],
}


class Reason(StrEnum):
    """Why slices get no gradient, in the words of a report."""

    NEVER = "never move a score"
    DETACHED = "move scores and never get a gradient: something detaches them"
    BOTH_ZERO = "never get a gradient: factors that are both 0"
    UNREACHED = "not reached by these texts"


def add_alive(alive: Slices, named: Iterable[tuple[str, Tensor]]) -> None:
    """Record in `alive` the rows and columns whose gradient is not all 0.

    Axes with few slices are left out. So are parameters with a hook, which may
    mask gradients. In vectors and small tables each entry is judged.
    """
    for name, parameter in named:
        grad, hooks = parameter.grad, parameter._backward_hooks
        if grad is None or grad.ndim < 1 or hooks:
            continue
        for axis in _axes(grad):
            slices = _slices(grad.to_dense(), axis)
            key, found = (name, axis), slices.any(1)
            alive[key] = alive.get(key, found) | found


def _axes(grad: Tensor) -> list[int]:
    """Return the axes along which slices of a gradient are judged."""
    axes = [
        axis
        for axis in range(min(2, grad.ndim))
        if LEAST <= grad.size(axis) < grad.numel()
    ]
    wide = max(grad.shape)
    table = grad.numel() <= TABLE_NUMBERS and min(grad.shape) < LEAST
    # no entries in float16, in which the smallest gradients become 0
    if wide > 1 and grad.dtype != torch.float16:
        if wide == grad.numel():
            return [ENTRIES]
        axes += [ENTRIES] * table
    return axes


def _slices(parameter: Tensor, axis: int) -> Tensor:
    """Return a parameter's slices along an axis, as (slices, entries)."""
    if axis == ENTRIES:
        return parameter.reshape(-1, 1)
    return parameter.transpose(0, axis).flatten(1)


def _move(parameter: Tensor, axis: int, chosen: Bool[Tensor, "_"]) -> None:
    """Change the chosen slices (rows, columns, entries) of a parameter.

    Entries change unequally, because a norm would cancel equal changes.
    """
    if axis == ENTRIES:
        parameter += chosen.view(parameter.shape).to(parameter)
    else:
        rows = parameter.transpose(0, axis)
        steps = torch.linspace(-1, 2, rows[0].numel()).view(rows[0].shape)
        rows[chosen] += steps.to(rows)


def _fewest(axis: int) -> int:
    """Return how many dead slices along an axis are a fault."""
    return 1 if axis == ENTRIES else FEWEST


def in_words(slices: Slices) -> list[str]:
    """Say how many slices of each parameter are dead, if enough to fail."""
    words = {0: "rows", 1: "columns", ENTRIES: "entries"}
    return [
        f"{int(found.sum())} of {len(found)} {words[axis]} of {name}"
        for (name, axis), found in slices.items()
        if int(found.sum()) >= _fewest(axis)
    ]


def reasons(
    subject: Subject, alive: Slices, collect: Collect
) -> Iterator[tuple[Reason, Axis, Bool[Tensor, "slices"]]]:
    """Yield reasons why slices of a parameter are dead though others live.

    Args:
        subject: the model.
        alive: slices that have a gradient in some texts.
        collect: a function that records which slices have a gradient. It takes
            a variant, and the length of the text for each seed.

    Yields:
        A reason, an axis and slices. Slices with the reason BOTH_ZERO are 0.
        They get a gradient with other weights, and may get one after a
        training step.
    """
    longest = min(subject.block_size, LONG if subject.heavy else 1 << 30)
    time = subject.lengths.fit(longest)
    dead = _dead_beside_live(alive, subject.vocab_size)
    if time < LEAST or not dead:
        return
    variant = changeable(subject, case=TRAIN)
    window = declared(variant.model, WINDOW)
    if window and window.value == 1:
        return  # in a window of one token, no query can choose among keys
    named = dict(variant.model.named_parameters())
    zeros = {(n, i): _slices(named[n], i) == 0 for n, i in dead}
    tokens = subject.draw(2, time)
    with operations_through(_Reads(named)) as reads:
        # two texts, because tokens may decide which indices are read
        for rows in (tokens, tokens.flip(0)):
            variant.scores(rows)
    read = {key: reads.of(key) for key in dead}
    for key in [key for key in dead if read[key]]:
        if key[1] == ENTRIES and named[key[0]].ndim > 1:
            del dead[key]  # a table whose rows tokens choose: not judged
        elif _by_tokens(read[key]) or read[key][0].shape.count(time) == 1:
            unread = _unread(dead.pop(key), read[key])
            shared = _share(read[key], time, len(unread))
            yield Reason.NEVER if shared else Reason.UNREACHED, key, unread
    dead = _without_rounding(variant, time, collect, dead)
    if not dead:
        return
    short, longer = _with_other_weights(variant, time, collect)
    for key, slices in dead.items():
        # without a record, every slice counts as alive, because the model's
        # own loss may reach them all
        every = torch.ones_like(slices)
        part = _Part(
            variant=variant,
            collect=collect,
            tokens=tokens,
            parameter=named[key[0]],
            key=key,
            slices=slices,
            short=short.get(key, every),
            longer=longer.get(key, every),
            zeros=slices & zeros[key].all(1),
            read=read[key],
            routed=reads.routed,
        )
        if part.revived and key[1] == ENTRIES:
            continue  # such as a bias of a unit that these texts do not use
        reason = next(filter(None, (find(part) for find in REASONS)))
        still = part.zeros if reason == Reason.BOTH_ZERO else part.still
        yield reason, key, still


def _dead_beside_live(alive: Slices, vocab_size: int) -> Slices:
    """Return the slices without a gradient, if other slices have one."""
    return {
        key: ~slices
        for key, slices in alive.items()
        if 0 < int(slices.sum()) <= len(slices) - _fewest(key[1])
        and len(slices) != vocab_size  # rows of ids are for check_vocabulary
    }


def _by_tokens(found: list[Int[Tensor, "..."]]) -> bool:
    """Return whether tokens decide the indices that read a parameter."""
    index, *others = found
    return not all(map(index.equal, others))


def _share(found: list[Int[Tensor, "..."]], time: int, count: int) -> bool:
    """Return whether positions share slices though each could have its own."""
    if _by_tokens(found):
        return False
    axis = found[0].shape.index(time)
    distinct = found[0].unique(dim=axis).size(axis)
    return 1 < distinct < time <= count


def _without_rounding(
    variant: Variant, time: int, collect: Collect, dead: Slices
) -> Slices:
    """Leave out entries that get a gradient in one further text.

    The gradient of a key's bias is only rounding, and is 0 in some texts.
    """
    if {axis for _, axis in dead} != {ENTRIES}:
        return dead
    once: Slices = {}
    collect(variant, {0: time}, once)
    return {
        key: left
        for key, slices in dead.items()
        if (left := slices & ~once.get(key, ~slices)).any()
    }


def _with_other_weights(
    variant: Variant, time: int, collect: Collect
) -> tuple[Slices, Slices]:
    """Return slices that get a gradient in short and in longer texts.

    The first texts run with the model's own weights, the others with redrawn
    matrices.
    """
    subject = variant.subject
    generator, short, longer = subject.generator(), Slices(), Slices()
    for seed in range(DRAWS):
        if seed:
            redraw_zeros(variant.model, generator, matrices=True)
        collect(variant, {seed: subject.lengths.fit(time // 2)}, short)
        collect(variant, {seed: time}, longer)
    return short, longer


# --- Reasons -----------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Dead slices of one parameter, and what is known about them.

    The functions in REASONS are tried in turn. Each returns the reason why the
    slices are dead, or None.

    Attributes:
        variant: the model, with weights that may be changed.
        collect: as for `reasons`.
        tokens: the longest texts.
        parameter: the parameter of the variant's model.
        key: the parameter's name and the axis of its slices.
        slices: the dead slices (rows, columns or entries).
        short: slices that get a gradient in short texts, with redrawn
            matrices.
        longer: slices that get a gradient in longer texts, with redrawn
            matrices.
        zeros: the dead slices whose entries are all 0.
        read: the indices with which a forward reads the parameter.
        routed: whether tokens choose experts.
    """

    variant: Variant
    collect: Collect
    tokens: Int[Tensor, "batch time"]
    parameter: Tensor
    key: Axis
    slices: Bool[Tensor, "slices"]
    short: Bool[Tensor, "slices"]
    longer: Bool[Tensor, "slices"]
    zeros: Bool[Tensor, "slices"]
    read: list[Int[Tensor, "..."]]
    routed: bool

    @property
    def still(self) -> Bool[Tensor, "slices"]:
        """Return the slices that no text and no other weights revive."""
        return self.slices & ~self.short & ~self.longer

    @property
    def revived(self) -> bool:
        """Return whether too few slices are still dead to be a fault."""
        return int(self.still.sum()) < _fewest(self.key[1])

    @property
    def grown(self) -> bool:
        """Return whether slices get a gradient only in longer texts.

        If some slices do, more slices may get a gradient in other texts.
        """
        return bool((self.longer & ~self.short).any())


def _revived(part: _Part) -> Reason | None:
    return Reason.BOTH_ZERO if part.revived else None


def _read_by_distances(part: _Part) -> Reason | None:
    if not part.read:
        return None
    still = part.still
    idle = _unread(still, part.read).sum() > IDLE * len(still)
    for_good = not part.grown and (idle or part.longer.sum() == 1)
    return Reason.NEVER if for_good else Reason.UNREACHED


def _alive_elsewhere(part: _Part) -> Reason | None:
    some = part.grown or not part.still.equal(part.slices)
    return Reason.UNREACHED if some else None


def _spare(part: _Part) -> Reason | None:
    spare = _are_spare(part.variant.subject, part.still)
    return Reason.UNREACHED if spare else None


def _routed_elsewhere(part: _Part) -> Reason | None:
    """Let experts be chosen at random, if the model chooses any."""
    if not part.routed:
        return None
    alive: Slices = {}
    with suppress(ModelRaised), operations_through(_choose_at_random):
        for seed in range(DRAWS):
            part.collect(part.variant, {seed: part.tokens.size(1)}, alive)
    dead = part.still
    moved = alive.get(part.key, dead) & dead
    return Reason.UNREACHED if moved.any() else None


def _useless_or_detached(part: _Part) -> Reason:
    """Change the slices; they are useless if scores stay, else detached."""
    before = part.variant.scores(part.tokens)
    _move(part.parameter.detach(), part.key[1], part.still)
    moved = differ(part.variant.scores(part.tokens), before)
    return Reason.DETACHED if moved else Reason.NEVER


REASONS: tuple[Callable[[_Part], Reason | None], ...] = (
    _revived,
    _read_by_distances,
    _alive_elsewhere,
    _spare,
    _routed_elsewhere,
    _useless_or_detached,
)


def _are_spare(subject: Subject, dead: Bool[Tensor, "slices"]) -> bool:
    """Return whether dead slices are rows of a head that belong to no id."""
    ids, behind = dead.tensor_split([subject.vocab_size])
    few = int(ids.sum()) < len(subject.hidden) + FEWEST
    return few and len(behind) > 0 and bool(behind.all())


class _Reads:
    """Records the indices that read each parameter, and choices by tokens."""

    def __init__(self, named: dict[str, Tensor]):
        self.names = {(p.data_ptr(), p.shape): n for n, p in named.items()}
        self.found = defaultdict[Axis, list[Int[Tensor, "..."]]](list)
        self.routed = False

    def of(self, key: Axis) -> list[Int[Tensor, "..."]]:
        """Return the indices with which a forward reads slices of an axis."""
        axes = (0, 1) if key[1] == ENTRIES else (key[1],)
        return [i for axis in axes for i in self.found.get((key[0], axis), [])]

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and record its indices."""
        self.routed |= name in ROUTES
        if name in READERS:
            of = self.names.get((args[0].data_ptr(), args[0].shape))
            for axis, index in READERS[name](args):
                if of and index is not None and index.dtype != torch.bool:
                    self.found[of, axis].append(index.cpu().clone())
        return func(*args, **kwargs)


def _choose_at_random(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run an operation with shuffled input, if its result is a choice."""
    if name in ROUTES:
        x, *rest = args
        order = torch.randperm(x.numel()).to(x.device)
        args = x.flatten()[order].view_as(x), *rest
    return func(*args, **kwargs)


def _unread(
    slices: Bool[Tensor, "slices"], found: list[Int[Tensor, "..."]]
) -> Bool[Tensor, "slices"]:
    """Return the slices that no index reads."""
    unread = slices.clone()
    for index in found:
        unread[index.flatten()] = False
    return unread
