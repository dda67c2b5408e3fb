"""How weights move: the optimizer, its rate and its random numbers."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from ..validation import is_number, whole_number


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run, apart from the model and the text.

    Raises:
        ValueError: naming the field and the value.

    Source: nanoGPT's defaults for a CPU.
    """

    steps: int = 2000  # number of updates
    batch_size: int = 12  # windows a step, over all processes
    lr: float = 1e-3  # the highest learning rate
    warmup: int = 100  # steps until it is reached, and less in short runs
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    betas: tuple[float, float] = (0.9, 0.99)  # of AdamW
    clip: float = 1.0  # largest norm of all gradients together
    eval_interval: int = 250  # steps from an evaluation to the next
    eval_batches: int = 100  # of each part of the text, in an evaluation
    seed: int = 0  # of the weights, the batches and the dropout

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        for name in ("steps", "batch_size", "eval_interval", "eval_batches"):
            count = whole_number(name, getattr(self, name), at_least=1)
            object.__setattr__(self, name, count)
        if not is_number(self.lr) or self.lr <= 0:
            raise ValueError(f"lr must be a number above 0, got {self.lr!r}")
        whole_number("seed", self.seed)

    @property
    def warmup_steps(self) -> int:
        """Number of steps in which the learning rate rises."""
        return min(self.warmup, self.steps // 10)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1.

        It rises in a line and falls along half a cosine, to a tenth.

        Source: Loshchilov and Hutter 2017 (SGDR); nanoGPT, train.py.
        """
        warmup = self.warmup_steps
        if step <= warmup:
            return self.lr * step / (warmup + 1)
        progress = (step - warmup) / max(1, self.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * (0.1 + 0.9 * share)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and embeddings only.

    Source: Loshchilov and Hutter 2019 (Decoupled Weight Decay
    Regularization); nanoGPT, model.py, for the two groups.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # one kernel for all tensors: on a CPU the loop over them is half a step
    kinds = {p.device.type for p in model.parameters()}
    return torch.optim.AdamW(
        groups,
        lr=recipe.lr,
        betas=recipe.betas,
        fused=kinds <= {"cpu", "cuda"},
    )


def seed_for(*purpose: object) -> int:
    """Return the seed that belongs to a purpose, such as ("batch", 0, 17).

    With a seed for each draw there is no state of generators to keep: step
    17 draws the same whether 16 steps went before it or a checkpoint, and
    in one process or in two.
    """
    digest = hashlib.sha256("/".join(map(str, purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(*purpose: object) -> torch.Generator:
    """Return a generator on the CPU with the seed of a purpose."""
    return torch.Generator().manual_seed(seed_for(*purpose))
