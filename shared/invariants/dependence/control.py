"""The control of a proof: what changes with a token must have been allowed.

The tokens of one position, or of one row, are changed at a time, and every
number of every operation is compared with the run that carried codes. A number
that moves although its code says that it could not shows a wrong rule of ours:
the proof is void.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..places import Place, find_place
from .codes import plain
from .shadows import UNSET, Shadows, Step, followed

Tokens = Int[Tensor, "batch time"]
Run = Callable[[Tokens], object]


class Control:
    """Compares runs with one that carried codes.

    Args:
        shadows: makes one, with the codes of the tokens.
    """

    def __init__(self, shadows: Callable[..., Shadows]):
        self.shadows = shadows
        self.steps: list[Step] = []
        self.parted: Place | None = None  # where a change took another path

    def record(self, run: Run, tokens: Tokens) -> None:
        """Keep each step of a run."""

        def keep(step: Step) -> None:
            step.outs = [o.detach().clone() for o in step.outs]
            step.codes = [plain(codes) for codes in step.codes]
            step.call = None
            self.steps.append(step)

        with followed(self.shadows(tokens, tape=keep)):
            run(tokens)

    def compare(
        self, run: Run, tokens: Tokens, code: int
    ) -> tuple[str, Place] | None:
        """Run with tokens changed; return an operation whose rule is wrong.

        Args:
            run: the same.
            tokens: with those of one code changed.
            code: of these.
        """
        wrong: list[tuple[str, Place]] = []
        steps = iter(self.steps)

        def look(step: Step) -> None:
            if self.parted is not None or wrong:
                return
            before = next(steps, None)
            if before is None or not _alike(before, step):
                self.parted = find_place(step.name)
                return
            for old, new, codes in zip(
                before.outs, step.outs, before.codes, strict=True
            ):
                if before.name in UNSET:
                    continue
                moved = old != new
                if before.routed and bool(moved.any()):
                    self.parted = before.place  # another routing
                    return
                moved = moved & (codes < code)
                if bool((moved & ~(old.isnan() & new.isnan())).any()):
                    wrong.append((before.name, before.place))

        with followed(self.shadows(tokens, tape=look, blind=True)):
            run(tokens)
        return wrong[0] if wrong else None


def _alike(one: Step, other: Step) -> bool:
    """Whether two steps are the same operation on the same shapes."""
    shapes: list[Sequence[object]] = [
        [(o.shape, o.dtype) for o in step.outs] for step in (one, other)
    ]
    return one.name == other.name and shapes[0] == shapes[1]


def changed(
    tokens: Tokens,
    where: Bool[Tensor, "batch time"],
    vocab: int,
    generator: torch.Generator,
) -> Tokens:
    """Return a copy with other tokens in some places."""
    shift = torch.randint(1, vocab, tokens.shape, generator=generator)
    other = (tokens + shift.to(tokens.device)) % vocab
    return torch.where(where.to(tokens.device), other, tokens)
