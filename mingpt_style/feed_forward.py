"""The block's second half: widen, apply the nonlinearity, narrow."""

from jaxtyping import Float
from torch import Tensor, nn

from gpt_duet.config import ACTIVATIONS, GPTConfig


class MLP(nn.Module):
    """Two linear layers around a nonlinearity; in GPT-2 it is GELU by tanh.

    Args:
        config: n_embd, n_inner, activation and dropout are used.

    Source: minGPT and nanoGPT, model.py; Hendrycks and Gimpel 2016 (GELU).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_size)
        self.act = ACTIVATIONS[config.activation]()
        self.c_proj = nn.Linear(config.inner_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Float[Tensor, "batch time n_embd"]
    ) -> Float[Tensor, "batch time n_embd"]:
        """Return dropout(c_proj(act(c_fc(x))))."""
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))
