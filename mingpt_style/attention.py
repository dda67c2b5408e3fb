"""Attention in minGPT's terms: one fused projection, one fused kernel."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gpt_duet.config import GPTConfig


class KeyValueCache:
    """Keys and values of the tokens that one layer has read.

    Args:
        like: a tensor with the dtype and the device to use.
        size: (batch, n_head, block_size, head size), allocated at once.
    """

    def __init__(self, like: Tensor, size: tuple[int, int, int, int]):
        self.k, self.v = like.new_empty(2, *size).unbind(0)
        self.length = 0

    def append(
        self,
        k: Float[Tensor, "batch nh time hs"],
        v: Float[Tensor, "batch nh time hs"],
    ) -> tuple[
        Float[Tensor, "batch nh longer hs"],
        Float[Tensor, "batch nh longer hs"],
    ]:
        """Add keys and values of new tokens; return those of all tokens."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class CausalSelfAttention(nn.Module):
    """Attend to the past in n_head heads at once.

    The kernel computes softmax(q k^T / sqrt(hs)) v. If it can, it does so
    without storing the (T, T) matrix. No mask is stored.

    Args:
        config: n_embd, n_head and dropout are used.

    Source: minGPT and nanoGPT, model.py; Dao et al. 2022 (FlashAttention).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        # one matrix makes query, key and value of all heads
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(
        self,
        x: Float[Tensor, "batch time n_embd"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "batch time n_embd"]:
        """Project, split into heads, attend, join the heads, project.

        With a cache, x follows the cached tokens, and is added to the cache.
        """
        B, T, C = x.size()
        hs = C // self.n_head

        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)

        mask, is_causal = None, True
        if cache is not None:
            k, v = cache.append(k, v)  # (B, nh, S, hs), S >= T
            S = k.size(2)
            is_causal = S == T
            if 1 < T < S:  # a single token may see the whole past
                # is_causal would align queries with the first keys
                mask = x.new_ones(T, S, dtype=torch.bool).tril(S - T)

        # pass 0 in eval mode, because the kernel does not know the mode
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=is_causal
        )  # (B, nh, T, hs)

        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))
