"""Rows, columns and entries of parameters that no score depends on."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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

# a parameter's name; 0 for its rows, 1 for columns, ENTRIES for its numbers
Axis = tuple[str, int]
Slices = dict[Axis, Bool[Tensor, "_"]]  # each of its own number

Collect = Callable[[Variant, dict[int, int], Slices], object]

ENTRIES = -1  # a flat view's axis
TABLE_NUMBERS = 64  # of a table of weights of skips, say, at most
FEWEST = 2  # dead slices: one may be padding, or a measure of the others
DRAWS = 4  # of all matrices: what is dead by chance is not dead again
LONG = 256  # tokens of a heavy model's texts, at most
LEAST = 4  # slices of an axis, and tokens of a text, that are looked at
IDLE = 1 / 3  # of a table: more than the last buckets of distances
ROUTES = ("topk", "sort", "argmax", "nonzero")  # tokens choose experts

# operations that read a table, and from their arguments the axes and indices
READERS: dict[str, Callable[[tuple], Iterable[tuple[int, Any]]]] = {
    "embedding": lambda args: [(0, args[1])],
    "index": lambda args: enumerate(args[1]),
    "index_select": lambda args: [args[1:3]],
}

# why slices have no gradient
NEVER = "never move a score"
DETACHED = "move scores and never get a gradient: something detaches them"
BOTH_ZERO = "never get a gradient: factors that are both 0"
UNREACHED = "not reached by these texts"


def add_alive(alive: Slices, named: Iterable[tuple[str, Tensor]]) -> None:
    """Add the rows and columns whose gradient is not exactly 0.

    Axes of a few slices are left out, and parameters whose gradients a hook
    may mask. Numbers are judged one by one in vectors and small tables.
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
    # the smallest gradients are 0 in float16
    if wide > 1 and grad.dtype != torch.float16:
        if wide == grad.numel():
            return [ENTRIES]
        axes += [ENTRIES] * table
    return axes


def _slices(parameter: Tensor, axis: int) -> Tensor:
    """Return a parameter's slices along an axis, as (slices, numbers)."""
    if axis == ENTRIES:
        return parameter.reshape(-1, 1)
    return parameter.transpose(0, axis).flatten(1)


def _move(parameter: Tensor, axis: int, chosen: Bool[Tensor, "_"]) -> None:
    """Move the chosen slices of a parameter along an axis.

    A norm takes away what moves all numbers of a row alike.
    """
    if axis == ENTRIES:
        parameter += chosen.view(parameter.shape).to(parameter)
    else:
        rows = parameter.transpose(0, axis)
        steps = torch.linspace(-1, 2, rows[0].numel()).view(rows[0].shape)
        rows[chosen] += steps.to(rows)


def _fewest(axis: int) -> int:
    """Return how many slices along an axis are a fault, at least."""
    return 1 if axis == ENTRIES else FEWEST


def in_words(slices: Slices) -> list[str]:
    """Return how many slices of which parameters these are, if enough."""
    words = {0: "rows", 1: "columns", ENTRIES: "entries"}
    return [
        f"{int(found.sum())} of {len(found)} {words[axis]} of {name}"
        for (name, axis), found in slices.items()
        if int(found.sum()) >= _fewest(axis)
    ]


def reasons(
    subject: Subject, alive: Slices, collect: Collect
) -> Iterator[tuple[str, Axis, Bool[Tensor, "slices"]]]:
    """Yield why slices are dead, of parameters of which some are alive.

    Args:
        subject: the model.
        alive: slices that have a gradient in some texts.
        collect: adds those that have one in texts of a length, by the seed.

    Yields:
        A reason, an axis and the slices; BOTH_ZERO for slices that are 0 and
        that other weights bring to life: a step of training may as well.
    """
    longest = min(subject.block_size, LONG if subject.heavy else 1 << 30)
    time = subject.lengths.fit(longest)
    dead = {
        key: ~slices
        for key, slices in alive.items()
        if 0 < int(slices.sum()) <= len(slices) - _fewest(key[1])
        and len(slices) != subject.vocab_size  # check_vocabulary judges ids
    }
    if time < LEAST or not dead:
        return
    variant = changeable(subject, case=TRAIN)
    window = declared(variant.model, WINDOW)
    if window and window.value == 1:
        return  # no query chooses among keys
    named = dict(variant.model.named_parameters())
    zeros = {(n, i): _slices(named[n], i) == 0 for n, i in dead}
    tokens = subject.draw(2, time)
    with operations_through(_Reads(named)) as reads:
        for rows in (tokens, tokens.flip(0)):  # whose indices tokens decide
            variant.scores(rows)
    read = {key: reads.of(key) for key in dead}
    for key in [key for key in dead if read[key]]:
        if key[1] == ENTRIES and named[key[0]].ndim > 1:
            del dead[key]  # a table of vectors, which tokens choose
            continue
        index, *others = found = read[key]
        by_tokens = not all(map(index.equal, others))
        if by_tokens or index.shape.count(time) == 1:
            unread = _unread(dead.pop(key), found)
            shared = False  # positions share rows of a table that has enough
            if not by_tokens:
                axis = index.shape.index(time)
                count = index.unique(dim=axis).size(axis)
                shared = 1 < count < time <= len(unread)
            yield NEVER if shared else UNREACHED, key, unread
    # the gradient of a key's bias is rounding, which is 0 now and then
    once: Slices = {}
    if dead.keys() and {axis for _, axis in dead} == {ENTRIES}:
        collect(variant, {0: time}, once)
        dead = {
            key: left
            for key, slices in dead.items()
            if (left := slices & ~once.get(key, ~slices)).any()
        }
    if not dead:
        return
    generator, short, longer = subject.generator(), Slices(), Slices()
    for seed in range(DRAWS):
        if seed:
            redraw_zeros(variant.model, generator, matrices=True)
        collect(variant, {seed: subject.lengths.fit(time // 2)}, short)
        collect(variant, {seed: time}, longer)
    for key, slices in dead.items():
        every = torch.ones_like(slices)  # a loss of its own moves them
        reached, more = short.get(key, every), longer.get(key, every)
        still = slices & ~reached & ~more
        # where some slices come to life, others may in other texts
        grown = bool((more & ~reached).any())
        revived = not still.equal(slices)
        if int(still.sum()) < _fewest(key[1]):
            if key[1] == ENTRIES:  # a bias of a unit that these texts miss
                continue
            reason, still = BOTH_ZERO, slices & zeros[key].all(1)
        elif read[key]:  # by distances
            idle = _unread(still, read[key]).sum() > IDLE * len(still)
            dead_for_good = not grown and (idle or more.sum() == 1)
            reason = NEVER if dead_for_good else UNREACHED
        elif (
            grown
            or revived
            or _are_spare(subject, still)
            or (reads.routed and _rerouted(variant, time, collect, key, still))
        ):
            reason = UNREACHED
        else:
            before = variant.scores(tokens)
            _move(named[key[0]].detach(), key[1], still)
            moved = differ(variant.scores(tokens), before)
            reason = DETACHED if moved else NEVER
        yield reason, key, still


def _rerouted(
    variant: Variant,
    time: int,
    collect: Collect,
    key: Axis,
    dead: Bool[Tensor, "slices"],
) -> bool:
    """Whether slices come to life where tokens choose at random."""
    alive: Slices = {}
    with suppress(ModelRaised), operations_through(_choose_at_random):
        for seed in range(DRAWS):
            collect(variant, {seed: time}, alive)
    return bool((alive.get(key, dead) & dead).any())


def _are_spare(subject: Subject, dead: Bool[Tensor, "slices"]) -> bool:
    """Whether slices are rows of a head behind those of all ids."""
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
        """Return the indices that read slices, or numbers along any axis."""
        axes = (0, 1) if key[1] == ENTRIES else (key[1],)
        return [i for axis in axes for i in self.found.get((key[0], axis), [])]

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and record the indices it reads by."""
        self.routed |= name in ROUTES
        if name in READERS:
            of = self.names.get((args[0].data_ptr(), args[0].shape))
            for axis, index in READERS[name](args):
                if of and index is not None and index.dtype != torch.bool:
                    self.found[of, axis].append(index.cpu().clone())
        return func(*args, **kwargs)


def _choose_at_random(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Carry out an operation; shuffle numbers that choices are made by."""
    if name in ROUTES:
        x, *rest = args
        order = torch.randperm(x.numel()).to(x.device)
        args = x.flatten()[order].view_as(x), *rest
    return func(*args, **kwargs)


def _unread(
    slices: Bool[Tensor, "slices"], found: list[Int[Tensor, "..."]]
) -> Bool[Tensor, "slices"]:
    """Return those of slices that no index reads."""
    unread = slices.clone()
    for index in found:
        unread[index.flatten()] = False
    return unread
