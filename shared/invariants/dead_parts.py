"""Rows and columns of parameters that no score depends on."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from .cases import TRAIN
from .errors import during
from .losses import cross_entropy
from .model.sizes import WINDOW, declared
from .operations import Operations
from .subject import Subject
from .tokens import rows_at_once
from .variant import Variant, changeable

Axis = tuple[str, int]  # a parameter's name; 0 for its rows, 1 for columns
Slices = dict[Axis, Bool[Tensor, "_"]]  # each of its own number

FEWEST = 2  # dead slices: one may be padding, or a measure of the others
DRAWS = 4  # of all matrices: what is dead by chance is not dead again
SMALL = 1e-2  # of a vector that starts at 0: below it counts as 0
LONG = 256  # tokens of a heavy model's texts, at most
LEAST = 4  # slices of an axis, and tokens of a text, that are looked at
ROUTES = ("topk", "sort", "argmax", "nonzero")  # tokens choose experts


def add_alive(alive: Slices, named: Iterable[tuple[str, Tensor]]) -> None:
    """Add the rows and columns whose gradient is not exactly 0.

    Slices of a single number are left out, and axes of a few.
    """
    for name, parameter in named:
        if parameter.grad is None or parameter.ndim < 2:
            continue
        moved = parameter.grad.to_dense() != 0
        for axis in (0, 1):
            found = moved.transpose(0, axis).flatten(1)
            if len(found) >= LEAST and found.size(1) > 1:
                key, found = (name, axis), found.any(1)
                alive[key] = alive.get(key, found) | found


def dead_in(alive: Slices) -> Slices:
    """Return the slices of parameters of which some are dead, not all."""
    return {
        key: ~slices
        for key, slices in alive.items()
        if slices.any() and int((~slices).sum()) >= FEWEST
    }


def in_words(key: Axis, slices: Bool[Tensor, "slices"]) -> str:
    """Return how many slices of which parameter these are."""
    kind = ("rows", "columns")[key[1]]
    return f"{int(slices.sum())} of {len(slices)} {kind} of {key[0]}"


def judge(
    subject: Subject, dead: Slices
) -> tuple[list[str], list[str], Slices, list[str]]:
    """Find out why slices are dead.

    Args:
        subject: the model.
        dead: slices that have no gradient in some texts.

    Returns:
        Slices that never move a score, in words; those that move some and
        have no gradient; those that other weights bring to life; in words
        those that longer texts, or other choices of experts, may reach.
    """
    longest = min(subject.block_size, LONG if subject.heavy else 1 << 30)
    time = subject.lengths.fit(longest)
    # check_vocabulary judges the rows of ids
    left = {k: s for k, s in dead.items() if len(s) != subject.vocab_size}
    if not left or time < LEAST:
        return [], [], {}, []
    variant = changeable(subject, case=TRAIN)
    window = declared(variant.model, WINDOW)
    if window is not None and window.value == 1:
        return [], [], {}, []  # no query chooses among keys
    tables, routed = _tables_of(variant, time)
    faults: list[str] = []
    detached: list[str] = []
    for key in left.keys() & tables.keys():
        pairs = [x for x in tables[key] if x.shape.count(time) > 1]
        if not pairs:  # its rows are decided by what is read
            shared = _shared(tables[key], time, len(left[key]))
            if shared:
                unread = ~_read(tables[key], left[key])
                faults.append(in_words(key, unread) + shared)
            del left[key]
    alive, longer = _redrawn(variant, left, time)
    hidden: Slices = {}
    unreached: list[str] = []
    for key, slices in left.items():
        still = ~longer.get(key, torch.ones_like(slices))
        words = in_words(key, still)
        if int(still.sum()) < FEWEST:
            hidden[key] = slices
        elif _is_padding(subject, still):
            continue
        elif key in tables:
            shared = _saturated(tables[key], time, still)
            (faults if shared else unreached).append(words + shared)
        elif routed or not alive[key].equal(longer[key]):
            unreached.append(words)
        else:
            moves = _moves_scores(variant, key, still, time)
            (detached if moves else faults).append(words)
    return faults, detached, hidden, unreached


def _moves_scores(
    variant: Variant, key: Axis, slices: Bool[Tensor, "slices"], time: int
) -> bool:
    """Whether scores move with slices of a parameter: they double."""
    tokens = variant.subject.draw(2, time)
    before = variant.scores(tokens)
    parameter = dict(variant.model.named_parameters())[key[0]]
    factors = 1.0 + slices.to(parameter)
    with torch.no_grad():
        parameter.transpose(0, key[1]).movedim(0, -1).mul_(factors)
        moved = not variant.scores(tokens).equal(before)
        parameter.transpose(0, key[1]).movedim(0, -1).div_(factors)
    return moved


def _is_padding(subject: Subject, dead: Bool[Tensor, "slices"]) -> bool:
    """Whether slices are rows of a table or head behind those of all ids."""
    vocab, excused = subject.vocab_size, len(subject.hidden) + FEWEST
    behind = dead[vocab:]
    few = int(dead[:vocab].sum()) < excused
    return len(behind) > 0 and bool(behind.all()) and few


class _Reads(Operations):
    """Records by which index each parameter is read, and choices."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {p.data_ptr(): n for n, p in model.named_parameters()}
        self.found = defaultdict[Axis, list[Tensor]](list)
        self.routed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        self.routed |= name in ROUTES
        axis, index = 0, args[1] if name == "embedding" else None
        if name == "index_select":
            axis, index = args[1:3]
        elif name == "index":
            given = [(i, x) for i, x in enumerate(args[1]) if x is not None]
            axis, index = given[0] if len(given) == 1 else (0, None)
        if index is not None and args[0].data_ptr() in self.names:
            key = self.names[args[0].data_ptr()], axis
            self.found[key].append(index.detach().cpu().clone())
        return answer


def _tables_of(
    variant: Variant, time: int
) -> tuple[dict[Axis, list[Tensor]], bool]:
    """Return the indices that read parameters, and whether tokens route.

    An index that tokens decide is left out.
    """
    subject, generator = variant.subject, variant.subject.generator()
    runs = []
    for _ in range(2):
        with _Reads(variant.model) as reads:
            variant.scores(subject.draw(2, time, generator))
        runs.append(reads)
    one, two = (reads.found for reads in runs)
    same = {
        key: [
            x
            for x, y in zip(found, two.get(key, ()), strict=False)
            if x.equal(y)
        ]
        for key, found in one.items()
    }
    return same, runs[0].routed


def _read(
    tables: list[Tensor], slices: Bool[Tensor, "slices"]
) -> Bool[Tensor, "slices"]:
    """Return which of as many slices are read."""
    read = torch.zeros_like(slices)
    for index in tables:
        read[index.flatten()] = True
    return read


def _shared(tables: list[Tensor], time: int, rows: int) -> str:
    """Return in words that positions share rows though there are enough."""
    for index in tables:
        if time in index.shape and time <= rows:
            at = index.movedim(index.shape.index(time), 0)
            count = len(at.reshape(time, -1)[:, 0].unique())
            if 1 < count < time:
                return f" ({time} positions share {count})"
    return ""


def _saturated(
    tables: list[Tensor], time: int, dead: Bool[Tensor, "slices"]
) -> str:
    """Return in words that most distances to the past share a row.

    The past is the side of a table of distances whose rows are alive; of
    two such sides, the one with more of them.
    """
    unread = int((dead & ~_read(tables, dead)).sum())
    for index in tables:
        axes = [axis for axis, n in enumerate(index.shape) if n == time]
        if len(axes) < 2:
            continue
        pairs = index.movedim(axes[:2], (0, 1)).reshape(time, time, -1)
        sides = (pairs[-1, :, 0], pairs[:, -1, 0])
        past = [x.bincount() for x in sides if not dead[x].any()]
        if past:
            counts = max(past, key=lambda x: int((x > 0).sum()))
            most = int(counts.max())
            many = 2 * most >= time and 4 * unread >= most
            if most == time or many:
                return f" ({most} of {time} distances share one)"
    return ""


def _redrawn(
    variant: Variant, dead: Slices, time: int
) -> tuple[Slices, Slices]:
    """Return what is alive in texts of half a length, and to that length.

    After the first time all matrices are drawn anew.
    """
    subject, generator = variant.subject, variant.subject.generator()
    short: Slices = {}
    longer: Slices = {}
    model, vocab = variant.model, subject.vocab_size
    named = [
        (n, p)
        for n, p in model.named_parameters()
        if (n, 0) in dead or (n, 1) in dead
    ]
    for seed in range(DRAWS if dead else 0):
        if seed:
            _redraw(model, generator)
        for size in (subject.lengths.fit(time // 2), time):
            rows = max(1, min(8, rows_at_once(vocab, size) // 4))
            ids = torch.randperm(rows * size, generator=generator) % vocab
            tokens = ids.view(rows, size)
            model.zero_grad()
            scores = variant.scores(tokens, grad=True, seed=seed).float()
            with during("in the backward pass in train mode"):
                cross_entropy(scores, tokens.flip(0, 1)).backward()
            add_alive(longer, named)
            if size < time:
                add_alive(short, named)
    return short, longer


@torch.no_grad()
def _redraw(model: nn.Module, generator: torch.Generator) -> None:
    """Replace each trainable matrix by random numbers of its size.

    Of vectors only zeros are replaced, by small ones: a gate opens, and no
    bias decides.
    """
    for p in model.parameters():
        if not p.requires_grad or getattr(p, "_backward_hooks", None):
            continue
        noise = torch.randn(p.shape, generator=generator).to(p)
        if p.ndim > 1 and p.numel():
            size = p.square().mean().sqrt()
            p.copy_(noise * torch.where(size > 0, size, p[0].numel() ** -0.5))
        elif p.ndim <= 1:
            p.copy_(torch.where(p.abs() <= SMALL, SMALL * noise, p))
