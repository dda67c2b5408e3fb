"""The optimizer of a run, its learning rate and its random numbers."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from ..validation import is_number, whole_number


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run, except the model and the text.

    Raises:
        ValueError: for an invalid field; the message names it and its value.

    Source: nanoGPT's defaults for a CPU.
    """

    steps: int = 2000  # number of updates
    batch_size: int = 12  # windows in each step, over all processes
    lr: float = 1e-3  # the highest learning rate
    warmup: int = 100  # steps until the rate is highest; fewer in short runs
    weight_decay: float = 0.1  # for matrices; norms and biases do not decay
    betas: tuple[float, float] = (0.9, 0.99)  # decays of AdamW's two moments
    clip: float = 1.0  # largest norm of all gradients together
    eval_interval: int = 250  # steps between evaluations
    eval_batches: int = 100  # batches of each text part in an evaluation
    seed: int = 0  # random seed of weights, batches and dropout

    def __post_init__(self) -> None:
        """Raise ValueError for invalid settings."""
        for name in ("steps", "batch_size", "eval_interval", "eval_batches"):
            count = whole_number(name, getattr(self, name), at_least=1)
            object.__setattr__(self, name, count)
        if not is_number(self.lr) or self.lr <= 0:
            raise ValueError(f"lr must be a number above 0, got {self.lr!r}")
        whole_number("seed", self.seed)

    @property
    def warmup_steps(self) -> int:
        """Return the number of steps in which the learning rate rises."""
        return min(self.warmup, self.steps // 10)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1.

        The rate rises linearly, then falls to a tenth along half a cosine.

        Source: Loshchilov and Hutter 2017 (SGDR); nanoGPT, train.py.
        """
        warmup = self.warmup_steps
        if step <= warmup:
            return self.lr * step / (warmup + 1)
        progress = (step - warmup) / max(1, self.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * (0.1 + 0.9 * share)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Return an AdamW that decays only matrices and embeddings.

    Source: Loshchilov and Hutter 2019 (Decoupled Weight Decay
    Regularization); nanoGPT, model.py, for the two groups.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # fused: one kernel for all tensors, because a loop over them takes half of
    # a step's time on a CPU
    kinds = {p.device.type for p in model.parameters()}
    return torch.optim.AdamW(
        groups,
        lr=recipe.lr,
        betas=recipe.betas,
        fused=kinds <= {"cpu", "cuda"},
    )


def seed_for(*purpose: object) -> int:
    """Return the seed for a purpose, such as ("batch", 0, 17).

    Each draw has its own seed, so no state of a generator has to be saved.
    Step 17 draws the same numbers in a resumed run as in one without
    interruption, and in two processes as in one.
    """
    digest = hashlib.sha256("/".join(map(str, purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(*purpose: object) -> torch.Generator:
    """Return a generator on the CPU with the seed of a purpose."""
    return torch.Generator().manual_seed(seed_for(*purpose))
