"""Two linear maps and a nonlinearity, the same at every position."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class PositionwiseFeedForward(nn.Module):
    """Widen to d_ff, apply the activation, narrow back to d_model.

    Args:
        d_model: width of the input and of the output.
        d_ff: width in between.
        dropout: probability of zeroing an element in between.
        activation: the paper's ReLU, or another function or module.

    Source: Vaswani et al. 2017 (Attention Is All You Need), equation 2.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Callable[[Tensor], Tensor] = F.relu,
    ):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation

    def forward(
        self, x: Float[Tensor, "batch time d_model"]
    ) -> Float[Tensor, "batch time d_model"]:
        """Return w_2(dropout(activation(w_1(x))))."""
        return self.w_2(self.dropout(self.activation(self.w_1(x))))
