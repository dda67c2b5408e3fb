"""A derivative by the backward pass, and by differences of values."""

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor, nn

from ....running.operations import is_plain
from ....running.ranks import current, local, local_row
from ....running.rounding import put_back_after

STEPS = (1, 1, 0.1, 0.1, 0.01)  # directions that are tried: a kink is crossed
SMOOTH, ROUGH = 1e-3, 0.1  # shares of a derivative that are uncertain
ROUNDINGS = 3  # units in which the sum of many roundings stays
WIDE = 1e-4  # a step that may cross a kink, so that only ROUGH is certain

COARSE = 1e-4  # unit of rounding from which on nothing can be compared
# Operations that stand still or jump: a gradient through them is estimated.
PIECEWISE = {"round", "floor", "ceil", "trunc", "sign", "sgn", "argmax"}
PIECEWISE |= {"argmin", "frac", "heaviside", "bucketize", "searchsorted"}


@dataclass(frozen=True)
class Pair:
    """A derivative by the backward pass, and by differences of values."""

    backward: float
    difference: float
    uncertain: float
    size: float
    least: float  # difference that counts

    @property
    def agree(self) -> bool:
        """Whether the two agree within the error of the differences."""
        if self.uncertain > ROUGH * self.size:  # nothing can be said
            return True
        return self.apart <= max(self.uncertain, self.least)

    @property
    def apart(self) -> float:
        """How far they are apart."""
        return abs(self.backward - self.difference)

    @property
    def share(self) -> float:
        """How far they are apart, relative to the larger one."""
        return self.apart / max(abs(self.backward), abs(self.difference))


@dataclass
class Along:
    """Measures the derivative of a value along directions in parameters.

    They are random, or those of `towards`.
    """

    free: dict[str, tuple[nn.Parameter, int | None]]
    gradients: dict[str, Tensor]
    value: Callable[[], float]
    step: float
    rounding: float
    generator: torch.Generator
    coarse: float = 0.0  # unit of rounding of gradients, if values have less
    towards: dict[str, Tensor] = field(default_factory=dict)

    def smoothest(self, names: list[str]) -> Pair:
        """Measure it along directions in these until one is smooth."""
        pairs = []
        for share in STEPS:
            pairs.append(self._measure(names, share * self.step))
            if pairs[-1].uncertain < SMOOTH * pairs[-1].size:
                break
        return min(pairs, key=lambda pair: pair.uncertain / pair.size)

    def _measure(self, names: list[str], step: float) -> Pair:
        directions, products = {}, {}
        ranks, generator = current(), self.generator
        if ranks is not None:  # stages draw for other names
            seed = int(torch.randint(2**31, (), generator=generator))
        for name in names:
            if name not in self.free:  # another rank's
                continue
            p, padding = self.free[name]
            p = local(p)
            size = float(p.detach().abs().double().square().mean()) ** 0.5
            kind = torch.complex64 if p.is_complex() else torch.float32
            if ranks is not None:
                drawn = seed + crc32(name.encode())
                generator = torch.Generator().manual_seed(drawn)
            noise = torch.randn(p.shape, generator=generator, dtype=kind)
            if name in self.towards:
                toward = self.towards[name]
                noise = toward / toward.abs().square().mean().sqrt()
            directions[name] = noise.to(p) * (size or 1.0)
            row = None
            if padding is not None:
                row = local_row(self.free[name][0], padding)
            if row is not None:
                directions[name][row] = 0
            gradient = self.gradients[name].conj()
            part = float((gradient * directions[name]).sum().real)
            products[name] = p, part
        parts = [part for _, part in products.values()]
        if ranks is not None:
            of_all = ranks.inner(products)
            parts = [part for part, _ in of_all]
        wide, near = (
            self._difference(directions, by) for by in (step, step / 2)
        )
        if ranks is not None and len(of_all) == 1:
            parts = [min(of_all[0], key=lambda one: abs(one - near))]
        size = sum(part**2 for part in parts) ** 0.5 + abs(near)
        return Pair(
            backward=sum(parts),
            difference=near,
            uncertain=2 * abs(near - wide) + self.rounding / step,
            size=max(size, 1e-300),
            least=max(
                ROUGH * size if step > WIDE else 0.0,
                self._rounding_of_gradients(directions),
            ),
        )

    def _rounding_of_gradients(self, directions: dict[str, Tensor]) -> float:
        """Return by how much rounded gradients move a derivative, at most."""
        if not self.coarse:
            return 0.0
        squares = torch.zeros(1, dtype=torch.float64)
        for name, direction in directions.items():
            products = self.gradients[name] * direction
            squares += products.abs().double().square().sum().cpu()
        if (ranks := current()) is not None:
            squares = ranks.reduced(squares)
        return ROUNDINGS * self.coarse * float(squares.sqrt())

    def _difference(self, directions: dict[str, Tensor], step: float) -> float:
        moved, values = [self.free[name][0] for name in directions], []
        for sign in (1, -1):
            with put_back_after(moved), torch.no_grad():
                for name, direction in directions.items():
                    p = local(self.free[name][0])
                    p.add_(direction, alpha=sign * step)
                values.append(self.value())
        return (values[0] - values[1]) / (2 * step)


def free_parameters(
    model: nn.Module,
) -> dict[str, tuple[nn.Parameter, int | None]]:
    """Return the trainable parameters whose gradients no hook changes.

    Each with its row of padding, if any, which gets no gradient by design.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tables = {id(table.weight): table for table in embeddings}
    free = {}
    for name, p in model.named_parameters():
        table = tables.get(id(p))
        scaled = table is not None and table.scale_grad_by_freq
        hooks = getattr(p, "_backward_hooks", None)
        own = scaled or hooks or not is_plain(type(local(p)))
        if p.requires_grad and p.numel() and not own:
            free[name] = p, None if table is None else table.padding_idx
    return free
