"""Attention in minGPT's words: one fused projection, one fused kernel."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from shared.config import GPTConfig


class CausalSelfAttention(nn.Module):
    """Attend to the past in n_head heads at once.

    The kernel computes softmax(q k^T / sqrt(hs)) v without ever holding the
    (T, T) matrix where it can; no mask is stored.

    Args:
        config: n_embd, n_head and dropout are used.

    Source: minGPT and nanoGPT, model.py; Dao et al. 2022 (FlashAttention).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        # query, key and value of all heads, in one matrix
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(
        self, x: Float[Tensor, "batch time n_embd"]
    ) -> Float[Tensor, "batch time n_embd"]:
        """Project, split into heads, attend, join the heads, project."""
        B, T, C = x.size()
        hs = C // self.n_head

        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)

        # the kernel does not know eval mode: dropout has to be told
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=p, is_causal=True
        )  # (B, nh, T, hs)

        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))
