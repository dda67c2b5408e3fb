"""The gradient that a backward pass returns is the function's own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..errors import SkipCheck, asked
from ..model.subject import Subject
from ..search.larger_weights import redraw_zeros
from ..search.leaks import Search
from ..search.tolerance import FLOOR, Inside, put_back_after
from ..search.trial import EVAL, Mode

STEPS = (1, 1, 0.1, 0.1, 0.01)  # directions that are tried: a kink is crossed
SMOOTH, ROUGH = 1e-3, 0.1  # shares of a derivative that are uncertain
WIDE = 1e-4  # a step that may cross a kink, so that only ROUGH is certain
COARSE = 1e-4  # unit of rounding from which on nothing can be compared
# Operations that stand still or jump: a gradient through them is estimated.
PIECEWISE = {"round", "floor", "ceil", "trunc", "sign", "sgn", "argmax"}
PIECEWISE |= {"argmin", "frac", "heaviside", "bucketize", "searchsorted"}


def check_gradients(subject: Subject) -> str:
    """The gradient belongs to the function that the forward computes.

    Why: with a backward of one's own, a detached factor, or a block that is
    recomputed with another dropout mask, training goes somewhere else.
    How: the derivative of a random combination of scores along a random
    direction must be what central differences say, in eval and train mode;
    if not, each parameter is tried alone. Straight-through estimators are
    told; padding rows and parameters with gradient hooks are left out.
    Cost: one backward and four forwards a mode where all is well.
    Reports: allenai/OLMo-core 828, openai/guided-diffusion 167: checkpointed
    blocks with another dropout mask in the backward pass.
    """
    model = subject.doubled(subject.build_module("a function has no weights"))
    assert isinstance(model, nn.Module)
    generator = subject.generator()
    redraw_zeros(model, generator)
    tokens = subject.draw(3, 8, generator)
    tokens[:, -1] = tokens[:, 0]  # an id that comes twice
    search, note = Search(subject, model), ""
    for mode in (EVAL, Mode("in train mode", training=True)):
        note = _compare(search, mode, tokens, generator) or note
    return f"eval and train mode, along random directions{note}"


def _compare(
    search: Search,
    mode: Mode,
    tokens: Int[Tensor, "rows time"],
    generator: torch.Generator,
) -> str:
    """Return what there is to tell, or raise for a gradient that is wrong."""
    assert isinstance(search.model, nn.Module)
    free = _free_parameters(search.model)
    with Inside() as inside:
        scores = search.call(tokens, mode, grad=True)
    if not free or not scores.requires_grad:
        raise SkipCheck("the scores have no gradient")
    if inside.unit > COARSE:
        raise SkipCheck("too coarse inside for differences")
    weights = torch.randn(scores.shape, generator=generator).to(scores)
    with asked("in the backward pass"):
        gradients = torch.autograd.grad(
            (scores * weights).sum(),
            [p for p, _ in free.values()],
            allow_unused=True,
            materialize_grads=True,
        )
    along = _Along(
        free,
        dict(zip(free, (g.to_dense() for g in gradients), strict=True)),
        lambda: float((search.call(tokens, mode) * weights).sum()),
        inside.unit ** (1 / 3),
        FLOOR * inside.unit * float((scores.detach() * weights).norm()),
        generator,
    )
    if along.smoothest([*free]).agree:
        return ""
    pairs = {name: along.smoothest([name]) for name in free}
    wrong = {n: pair for n, pair in pairs.items() if not pair.agree}
    if inside.operations & PIECEWISE or any(
        pair.difference == 0 for pair in wrong.values()
    ):
        return "; through what is piecewise constant gradients are estimates"
    if not wrong:
        return ""
    name, pair = max(wrong.items(), key=lambda item: item[1].share)
    raise AssertionError(
        f"the gradient of {name} is not the function's: along a random "
        f"direction the backward pass says {pair.backward:.6g}, differences "
        f"of the scores say {pair.difference:.6g} (+- {pair.uncertain:.1g})"
        f"{search.conditions(mode)}"
    )


@dataclass(frozen=True)
class _Pair:
    """A derivative by the backward pass, and by differences of values."""

    backward: float
    difference: float
    uncertain: float
    size: float
    least: float  # difference that counts

    @property
    def agree(self) -> bool:
        if self.uncertain > ROUGH * self.size:  # nothing can be said
            return True
        apart = abs(self.backward - self.difference)
        return apart <= max(self.uncertain, self.least)

    @property
    def share(self) -> float:
        largest = max(abs(self.backward), abs(self.difference))
        return abs(self.backward - self.difference) / largest


@dataclass
class _Along:
    """Measures the derivative of a value along directions in parameters."""

    free: dict[str, tuple[nn.Parameter, int | None]]
    gradients: dict[str, Tensor]
    value: Callable[[], float]
    step: float
    rounding: float
    generator: torch.Generator

    def smoothest(self, names: list[str]) -> _Pair:
        """Measure it along directions in these until one is smooth."""
        pairs = []
        for share in STEPS:
            pairs.append(self._measure(names, share * self.step))
            if pairs[-1].uncertain < SMOOTH * pairs[-1].size:
                break
        return min(pairs, key=lambda pair: pair.uncertain / pair.size)

    def _measure(self, names: list[str], step: float) -> _Pair:
        directions, parts = {}, []
        for name in names:
            p, padding = self.free[name]
            size = float(p.detach().double().square().mean()) ** 0.5 or 1.0
            noise = torch.randn(p.shape, generator=self.generator)
            directions[name] = noise.to(p) * size
            if padding is not None:
                directions[name][padding] = 0
            parts.append(
                float((self.gradients[name] * directions[name]).sum())
            )
        wide, near = (
            self._difference(directions, by) for by in (step, step / 2)
        )
        size = sum(part**2 for part in parts) ** 0.5 + abs(near)
        return _Pair(
            backward=sum(parts),
            difference=near,
            uncertain=2 * abs(near - wide) + self.rounding / step,
            size=max(size, 1e-300),
            least=ROUGH * size if step > WIDE else 0.0,
        )

    def _difference(self, directions: dict[str, Tensor], step: float) -> float:
        moved, values = [self.free[name][0] for name in directions], []
        for sign in (1, -1):
            with put_back_after(moved), torch.no_grad():
                for p, direction in zip(
                    moved, directions.values(), strict=True
                ):
                    p.add_(direction, alpha=sign * step)
                values.append(self.value())
        return (values[0] - values[1]) / (2 * step)


def _free_parameters(
    model: nn.Module,
) -> dict[str, tuple[nn.Parameter, int | None]]:
    """Return the trainable parameters whose gradients nobody changes.

    Each with its row of padding, if any, which gets no gradient by design.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tables = {id(table.weight): table for table in embeddings}
    free = {}
    for name, p in model.named_parameters():
        table = tables.get(id(p))
        scaled = table is not None and table.scale_grad_by_freq
        hooks = getattr(p, "_backward_hooks", None)
        if p.requires_grad and p.numel() and not (scaled or hooks):
            free[name] = p, None if table is None else table.padding_idx
    return free
