"""Rows and columns of parameters that no score depends on."""

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
from ....running.subject import Subject
from ....running.variant import Variant, changeable, redraw_zeros
from ....running.ways import TRAIN

Axis = tuple[str, int]  # a parameter's name; 0 for its rows, 1 for columns
Slices = dict[Axis, Bool[Tensor, "_"]]  # each of its own number

Collect = Callable[[Variant, dict[int, int], Slices], object]

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

    Slices of a single number are left out, and axes of a few, and parameters
    whose gradients a hook may mask.
    """
    for name, parameter in named:
        grad, hooks = parameter.grad, parameter._backward_hooks
        if grad is None or grad.ndim < 2 or hooks:
            continue
        for axis in (0, 1):
            slices = grad.to_dense().transpose(0, axis).flatten(1)
            if len(slices) >= LEAST and slices.size(1) > 1:
                key, found = (name, axis), slices.any(1)
                alive[key] = alive.get(key, found) | found


def in_words(slices: Slices) -> list[str]:
    """Return how many slices of which parameters these are, if not one."""
    return [
        f"{int(found.sum())} of {len(found)} {('rows', 'columns')[axis]} of "
        f"{name}"
        for (name, axis), found in slices.items()
        if int(found.sum()) >= FEWEST
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
        if 0 < int(slices.sum()) <= len(slices) - FEWEST
        and len(slices) != subject.vocab_size  # check_vocabulary judges ids
    }
    if time < LEAST or not dead:
        return
    variant = changeable(subject, case=TRAIN)
    window = declared(variant.model, WINDOW)
    if window and window.value == 1:
        return  # no query chooses among keys
    named = dict(variant.model.named_parameters())
    zeros = {(n, i): named[n].transpose(0, i) == 0 for n, i in dead}
    tokens = subject.draw(2, time)
    with operations_through(_Reads(named)) as reads:
        for rows in (tokens, tokens.flip(0)):  # whose indices tokens decide
            variant.scores(rows)
    for key in [key for key in dead if key in reads.found]:
        index, *others = found = reads.found[key]
        by_tokens = not all(map(index.equal, others))
        if by_tokens or index.shape.count(time) == 1:
            unread = _unread(dead.pop(key), found)
            shared = False  # positions share rows of a table that has enough
            if not by_tokens:
                axis = index.shape.index(time)
                count = index.unique(dim=axis).size(axis)
                shared = 1 < count < time <= len(unread)
            yield NEVER if shared else UNREACHED, key, unread
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
        if int(still.sum()) < FEWEST:
            reason, still = BOTH_ZERO, slices & zeros[key].flatten(1).all(1)
        elif key in reads.found:  # by distances
            idle = _unread(still, reads.found[key]).sum() > IDLE * len(still)
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
            named[key[0]].detach().transpose(0, key[1])[still] += 1
            moved = not variant.scores(tokens).equal(before)
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
