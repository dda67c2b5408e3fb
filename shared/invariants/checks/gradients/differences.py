"""Compare a derivative by the backward pass with finite differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor, nn

from ....running.operations import is_plain
from ....running.ranks import current, local, local_row
from ....running.rounding import put_back_after

# sizes of the steps, tried in turn because a large step may cross a kink
STEPS = (1, 1, 0.1, 0.1, 0.01)
# uncertainty as a share of a derivative: below SMOOTH, no further step is
# tried; above ROUGH, no verdict is possible
SMOOTH, ROUGH = 1e-3, 0.1
ROUNDINGS = 3  # many roundings of a value add up to at most this many units
WIDE = 1e-4  # a larger step may cross a kink: only ROUGH is certain

# a unit of rounding above this is too coarse to compare gradients
COARSE = 1e-4
# Piecewise-constant operations: a gradient through them is an estimate.
PIECEWISE = {"round", "floor", "ceil", "trunc", "sign", "sgn", "argmax"}
PIECEWISE |= {"argmin", "frac", "heaviside", "bucketize", "searchsorted"}


@dataclass(frozen=True)
class Pair:
    """A derivative by the backward pass, and one by finite differences."""

    backward: float
    difference: float
    uncertain: float
    size: float
    least: float  # the least difference that counts

    @property
    def agree(self) -> bool:
        """Return whether both agree within the error of finite differences."""
        if self.uncertain > ROUGH * self.size:  # too uncertain to decide
            return True
        return self.apart <= max(self.uncertain, self.least)

    @property
    def apart(self) -> float:
        """Return the distance of the two derivatives."""
        return abs(self.backward - self.difference)

    @property
    def share(self) -> float:
        """Return the distance as a share of the larger derivative."""
        return self.apart / max(abs(self.backward), abs(self.difference))


@dataclass
class Along:
    """Measures the derivative of a value along directions in weight space.

    The directions are random, or given by `towards`.
    """

    free: dict[str, tuple[nn.Parameter, int | None]]
    gradients: dict[str, Tensor]
    value: Callable[[], float]
    step: float
    rounding: float
    generator: torch.Generator
    # unit of rounding of gradients, if above that of values, else 0
    coarse: float = 0.0
    towards: dict[str, Tensor] = field(default_factory=dict)

    def smoothest(self, names: list[str]) -> Pair:
        """Measure along some directions; return the most certain result."""
        pairs = []
        for share in STEPS:
            pairs.append(self._measure(names, share * self.step))
            if pairs[-1].uncertain < SMOOTH * pairs[-1].size:
                break
        return min(pairs, key=lambda pair: pair.uncertain / pair.size)

    def _measure(self, names: list[str], step: float) -> Pair:
        directions, products = {}, {}
        ranks, generator = current(), self.generator
        # pipeline stages draw different amounts: give each name its own seed
        if ranks is not None:
            seed = int(torch.randint(2**31, (), generator=generator))
        for name in names:
            if name not in self.free:  # a parameter of another rank
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
            # float32 even for a float64 parameter, to save memory
            directions[name] = noise.to(p.device).mul_(size or 1.0)
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
        wide, near = self._differences(directions, (step, step / 2))
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
        """Return the largest effect of rounded gradients on a derivative."""
        if not self.coarse:
            return 0.0
        squares = torch.zeros(1, dtype=torch.float64)
        for name, direction in directions.items():
            products = self.gradients[name] * direction
            squares += products.abs().double().square().sum().cpu()
        if (ranks := current()) is not None:
            squares = ranks.reduced(squares)
        return ROUNDINGS * self.coarse * float(squares.sqrt())

    def _differences(
        self, directions: dict[str, Tensor], steps: Sequence[float]
    ) -> list[float]:
        """Return the derivative by finite differences for each step length."""
        moved = [self.free[name][0] for name in directions]
        found = []
        with put_back_after(moved) as saved, torch.no_grad():
            for step in steps:
                values = []
                for sign in (1, -1):
                    for weight, value, direction in zip(
                        moved, saved, directions.values(), strict=True
                    ):
                        p = local(weight).copy_(value)
                        p.add_(direction, alpha=sign * step)
                    values.append(self.value())
                found.append((values[0] - values[1]) / (2 * step))
        return found


def free_parameters(
    model: nn.Module,
) -> dict[str, tuple[nn.Parameter, int | None]]:
    """Return the trainable parameters whose gradients no hook changes.

    Each comes with the index of its padding row (no gradient), or None.
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
