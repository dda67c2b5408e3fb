"""Redraw weights that hide faults: both sides get the same new entries.

The weights of an untrained norm or bias are all 1 or 0, which hides whether
they are used. Small weights in matrices hide a clamp or a weak mask. So
weights that are known to be equal on both sides are changed in the same way.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ...running.model.building import Builder
from ...running.operations import is_plain
from ...running.ranks import local
from ...running.subject import Subject
from ...tracing.value import digest
from .weights import WeightMatch, match_weights

SPREAD = 0.3  # standard deviation of the noise that is added to a weight
FIRST_NUMBERS = 64  # how many entries of a weight are compared first
LARGEST_FACTOR = 3000.0  # largest factor by which a matrix is scaled
ENDING = re.compile(r"[./_](weight|bias|kernel|gain|scale|shift|w|b)$")
AS_THEY_ARE = ("equal", "transposed", "joined", "part")
MOVED = (*AS_THEY_ARE, "rows in another order", "halves interleaved")

Names = tuple[str, ...]
# what equal vectors share: size, entry, whether their layer has a matrix
Vectors = tuple[int, float, bool]


@dataclass(frozen=True)
class Plan:
    """The weights to change in two models, by name.

    Attributes:
        pairs: names of corresponding vectors on the left and on the right.
            All entries of such a vector are equal.
        constant: names of such vectors without a counterpart.
        matrices: for each side, the matrices to scale.
    """

    pairs: tuple[tuple[Names, Names], ...]
    constant: Names
    matrices: tuple[Names, Names]

    @property
    def redrawn(self) -> int:
        """Return how many vectors are redrawn."""
        return sum(len(ours) + len(theirs) for ours, theirs in self.pairs)


def plan_of(
    left: nn.Module, right: nn.Module, matches: Sequence[WeightMatch]
) -> Plan:
    """Return the weights that may be changed in both models.

    Args:
        left: the model on the left.
        right: the model on the right.
        matches: for each of the right's weights, its counterpart on the left.
    """
    found = _Constants(left, right, matches)
    pairs = [
        *found.by_name(),
        *found.by_matrix(left, right),
        *found.by_count(),
        *found.of_the_left(),
    ]
    rest = (*found.open[0], *found.open[1])
    return Plan(tuple(pairs), rest, _matrices(left, right, matches))


# --- Vectors of equal numbers ------------------------------------------------


@dataclass
class _Constants:
    """The unpaired vectors of both sides whose entries are all equal.

    Each method yields pairs and removes them from `open`. To find more pairs,
    add a method that takes them by `_take`, and call it in `plan_of`.
    """

    left: nn.Module
    right: nn.Module
    matches: Sequence[WeightMatch]
    open: tuple[dict[str, Tensor], dict[str, Tensor]] = field(init=False)
    # layers whose matrix has its entries in another order on the other side
    changed: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.open = _constants(self.left), _constants(self.right)
        self.matches = [m for m in self.matches if m.name not in self.open[1]]
        # the bias of such a layer may be in another order, as its matrix is
        self.changed = {
            _stem(match.name)
            for match in self.matches
            if match.how not in (*AS_THEY_ARE, "zero")
        }

    def _take(self, ours: Names, theirs: Names) -> tuple[Names, Names]:
        for side, names in zip(self.open, (ours, theirs), strict=True):
            for name in names:
                del side[name]
        return ours, theirs

    def by_name(self) -> Iterator[tuple[Names, Names]]:
        """Yield pairs of vectors with the same name, up to its spelling."""
        for written in (lambda name: name, _plain_name):
            theirs = defaultdict(list)
            for name in self.open[1]:
                if _stem(name) not in self.changed:
                    theirs[written(name)].append(name)
            for name, ours in [*self.open[0].items()]:
                twins = theirs[written(name)]
                if len(twins) == 1 and _equal(ours, self.open[1][twins[0]]):
                    yield self._take((name,), (twins.pop(),))

    def by_matrix(
        self, left: nn.Module, right: nn.Module
    ) -> Iterator[tuple[Names, Names]]:
        """Yield pairs of vectors of layers whose matrices are matched."""
        yield from self._beside_matrices(self.matches, 0)
        if any(match.how == "part" for match in self.matches):
            others = match_weights(right, left)
            own = [m for m in others if m.name not in _constants(left)]
            yield from self._beside_matrices(own, 1)

    def _beside_matrices(
        self, matches: Sequence[WeightMatch], left: int
    ) -> Iterator[tuple[Names, Names]]:
        """Yield pairs of vectors of layers whose matrices are matched.

        `left` is the index of the side that has the matches' sources.
        """
        sources, others = self.open[left], self.open[1 - left]
        stems = {_stem(name): name for name in sources}
        for match in matches:
            mine = _beside(match.name, others)
            ours = tuple(stems.get(_stem(s), "") for s in match.sources)
            if mine is None or match.how not in AS_THEY_ARE[:3]:
                continue
            if not ours or len({*ours}) < len(ours):
                continue
            if not all(name in sources for name in ours):
                continue
            size = sum(sources[name].numel() for name in ours)
            first = sources[ours[0]]
            alike = first.flatten()[0] == others[mine].flatten()[0]
            if size == others[mine].numel() and bool(alike):
                two = (ours, (mine,)) if left == 0 else ((mine,), ours)
                yield self._take(*two)

    def by_count(self) -> Iterator[tuple[Names, Names]]:
        """Pair all equal vectors, if both sides have the same number of them.

        Their order does not matter, because all of them get the same entries.
        """
        groups: tuple[dict[Vectors, list[str]], ...] = ({}, {})
        for group, side, model in zip(
            groups, self.open, (self.left, self.right), strict=True
        ):
            wide = {
                _stem(n) for n, p in model.named_parameters() if p.dim() > 1
            }
            for name, vector in side.items():
                number = float(vector.flatten()[0])
                key = vector.numel(), number, _stem(name) in wide
                group.setdefault(key, []).append(name)
        for key, ours in groups[0].items():
            theirs = groups[1].get(key, [])
            turned = any(_stem(name) in self.changed for name in theirs)
            whole = all(self.open[0][name].dim() < 2 for name in ours)
            if len(ours) == len(theirs) and whole and not turned:
                yield self._take(tuple(ours), tuple(theirs))

    def of_the_left(self) -> Iterator[tuple[Names, Names]]:
        """Yield the left's vectors that the right omits.

        Nothing is yielded unless the left has all names of the right. A vector
        that only the right has is not redrawn, because it stays 0 if the
        checkpoint lacks it.
        """
        ours, theirs = (
            {name for name, _ in model.named_parameters()}
            for model in (self.left, self.right)
        )
        lacking = tuple(name for name in self.open[0] if name not in theirs)
        if theirs < ours and lacking:
            yield self._take(lacking, ())


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters whose entries are all equal, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        weight = local(parameter).detach()
        plain = is_plain(type(local(parameter)))
        if not plain or parameter._backward_hooks or not weight.numel():
            continue
        if not weight.is_floating_point():
            continue
        first = weight.flatten()[0]
        one = weight.numel() == 1 and bool(first != 0)
        begin = weight.flatten()[:FIRST_NUMBERS]  # most differ already here
        alike = bool((begin == first).all()) and bool((weight == first).all())
        if alike and not one:
            found[name] = weight
    return found


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool(
        ours.flatten()[0] == theirs.flatten()[0]
    )


def _stem(name: str) -> str:
    """Return the name of a weight's layer: its name without the last word."""
    return ENDING.sub("", name)


def _beside(name: str, others: Mapping[str, Tensor]) -> str | None:
    """Return the name of the vector that belongs to a matrix's layer."""
    stem = _stem(name)
    return next((n for n in others if _stem(n) == stem and n != name), None)


def _plain_name(name: str) -> str:
    """Return a weight's name without punctuation or a prefix such as "w"."""
    words = re.split(r"[\W_]+", name)
    return ".".join(words[1:] if words[0] in ("w", "model") else words)


# --- Matrices ----------------------------------------------------------------


def _matrices(
    left: nn.Module, right: nn.Module, matches: Sequence[WeightMatch]
) -> tuple[Names, Names]:
    """Return each side's matrices that can all be scaled by one factor.

    All copies of a matrix's entries must be scaled with it, on both sides. So
    a matrix is left out if an embedding table, a weight without a counterpart
    or a tensor that is not a parameter may have its entries.
    """
    ours, theirs = _parameters(left), _parameters(right)
    twins = _twins(ours)
    known = {
        match.name: {t for s in match.sources for t in twins[s]}
        for match in matches
        if match.how in MOVED
    }
    lost = {theirs[m.name].numel() for m in matches if m.how == "absent"}
    held = _held_elsewhere(left) + _held_elsewhere(right)
    barred = {n for n, p in ours.items() if not _scalable(p, lost, held)}
    barred |= _tables(left) | _not_covered(ours, theirs, matches, twins)
    odd = _tables(right) | {n for n, p in theirs.items() if p.ndim < 2}
    # bar each matrix that shares entries with a barred one, until none is left
    while True:
        odd |= {n for n, sources in known.items() if barred & sources}
        more = {s for n in odd for s in known.get(n, ())} - barred
        if not more:
            break
        barred |= more
    return (
        tuple(n for n in ours if n not in barred),
        tuple(n for n in known if n not in odd),
    )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def _twins(weights: Mapping[str, nn.Parameter]) -> dict[str, set[str]]:
    """Return, for each weight, the names of all weights with equal entries.

    A match by value cannot tell these weights apart.
    """
    groups: dict[tuple[int, str], set[str]] = {}
    for name, weight in weights.items():
        size = float(local(weight).detach().double().norm())
        key = weight.numel(), f"{size:.6e}"
        groups.setdefault(key, set()).add(name)
    return {name: group for group in groups.values() for name in group}


def _not_covered(
    ours: Mapping[str, nn.Parameter],
    theirs: Mapping[str, nn.Parameter],
    matches: Sequence[WeightMatch],
    twins: Mapping[str, set[str]],
) -> set[str]:
    """Return the left's weights that have entries which the right lacks."""
    covered = Counter[str]()
    for match in matches:
        if match.how not in MOVED:
            continue
        whole = sum(ours[source].numel() for source in match.sources)
        share = min(1.0, theirs[match.name].numel() / whole)
        for source in {t for s in match.sources for t in twins[s]}:
            covered[source] += round(ours[source].numel() * share)
    return {n for n, p in ours.items() if covered[n] < p.numel()}


def _scalable(
    parameter: nn.Parameter, lost: set[int], held: Sequence[Tensor]
) -> bool:
    """Return whether a weight is a plain matrix that is copied nowhere."""
    if parameter.ndim < 2 or not is_plain(type(local(parameter))):
        return False
    if not parameter.is_floating_point() or parameter.numel() in lost:
        return False
    alike = [t for t in held if t.numel() == parameter.numel()]
    mine = digest(local(parameter)) if alike else None
    return not any(digest(tensor).is_copy(mine) for tensor in alike if mine)


def _held_elsewhere(model: nn.Module) -> list[Tensor]:
    """Return the float tensors of a model that are not parameters."""
    found: list[Tensor] = []
    todo: list[object] = [vars(module) for module in model.modules()]
    seen = set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, Tensor) and value.is_floating_point():
            found.append(value)
    return [t for t in found if not isinstance(t, nn.Parameter)]


def _tables(model: nn.Module) -> set[str]:
    """Return the names of tables of embeddings."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters()
    }
    return {n for n, p in model.named_parameters() if id(p) in tables}


# --- Changing the weights of both models -------------------------------------


@torch.no_grad()
def redraw(left: nn.Module, right: nn.Module, plan: Plan, seed: int) -> None:
    """Give paired constant vectors the same new entries on both sides."""
    generator = torch.Generator().manual_seed(seed)
    sides = dict(left.named_parameters()), dict(right.named_parameters())
    for names in plan.pairs:
        parts = [
            [local(side[name]) for name in own]
            for side, own in zip(sides, names, strict=True)
        ]
        joined = [sum(part.numel() for part in own) for own in parts]
        several = len({*joined} - {0}) == 1 and min(map(len, names)) < 2
        size = max(joined) if several else (parts[0] or parts[1])[0].numel()
        noise = SPREAD * torch.randn(size, generator=generator)
        for own in parts:
            start = 0
            for part in own:
                end = start + part.numel()
                new = noise[start:end] if several else noise
                part.add_(new.view(part.shape).to(part))
                start = end


@torch.no_grad()
def scale(left: nn.Module, right: nn.Module, plan: Plan, size: float) -> float:
    """Scale the matrices of both models by one factor, and return it.

    The factor is chosen so that the products of the median matrix get a root
    mean square of `size`.
    """
    weights = [
        [local(p) for n, p in model.named_parameters() if n in {*names}]
        for model, names in zip((left, right), plan.matrices, strict=True)
    ]
    sizes = sorted(
        float(p.double().square().mean()) ** 0.5 * p.numel() ** 0.25
        for p in weights[0]
    )
    middle = sizes[len(sizes) // 2] if sizes else 0.0
    if middle == 0:
        return 1.0
    factor = min(max(size / middle, 1.0), LARGEST_FACTOR)
    for weight in (*weights[0], *weights[1]):
        weight.mul_(factor)
    return factor


def with_model(subject: Subject, model: nn.Module) -> Subject:
    """Return a subject that makes its copies from another model."""
    builder = Builder(model, subject.seed, subject.builder.device)
    return replace(subject, builder=builder, kept={}, proofs={})
