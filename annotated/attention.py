"""Attention as Vaswani et al. write it: four projections, one formula."""

import math

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .layers import clones


class MultiHeadedAttention(nn.Module):
    """Attend in h heads side by side, each d_k = d_model / h wide.

    Set `keep_attn` to keep the probabilities of the last forward, detached,
    as `attn`.

    Args:
        h: number of heads.
        d_model: width of the input and of the output.
        dropout: probability of zeroing an attention probability.

    Raises:
        ValueError: if d_model is not a multiple of h.

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, h: int, d_model: int, dropout: float = 0.1):
        super().__init__()
        if h < 1 or d_model % h != 0:
            raise ValueError(f"h={h} heads do not divide d_model={d_model}")
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.dropout = nn.Dropout(p=dropout)
        self.keep_attn = False
        self.attn: Tensor | None = None

    def forward(
        self,
        query: Float[Tensor, "batch time d_model"],
        key: Float[Tensor, "batch key_time d_model"],
        value: Float[Tensor, "batch key_time d_model"],
        mask: Shaped[Tensor, "#batch #time key_time"] | None = None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Project, split into heads, attend, join the heads, project.

        Raises:
            ValueError: unless mask has shape (1 or batch, time, key_time).
        """
        if mask is not None:
            # each head would get one row of a (time, key_time) mask: a leak
            if mask.dim() != 3 or mask.size(0) not in (1, query.size(0)):
                raise ValueError(
                    "a mask is (1 or batch, time, key_time), "
                    f"got {tuple(mask.shape)} for a batch of {query.size(0)}"
                )
            mask = mask.unsqueeze(1)  # add an axis: one mask for all heads

        query, key, value = self.project(query, key, value)
        x, p_attn = attention(query, key, value, mask, self.dropout)
        if self.keep_attn:
            self.attn = p_attn.detach()
        return self.join(x)

    def project(
        self, *inputs: Float[Tensor, "batch _ d_model"]
    ) -> list[Float[Tensor, "batch h _ d_k"]]:
        """Project query, key and value, each to h heads of width d_k."""
        return [
            linear(x).unflatten(-1, (self.h, self.d_k)).transpose(1, 2)
            for linear, x in zip(self.linears[:3], inputs, strict=True)
        ]

    def join(
        self, x: Float[Tensor, "batch h time d_k"]
    ) -> Float[Tensor, "batch time d_model"]:
        """Put the heads side by side, and project with the fourth matrix."""
        x = x.transpose(1, 2).flatten(-2)
        return self.linears[-1](x)


def attention(
    query: Float[Tensor, "*batch time d_k"],
    key: Float[Tensor, "*batch key_time d_k"],
    value: Float[Tensor, "*batch key_time d_v"],
    mask: Shaped[Tensor, "*#batch #time key_time"] | None = None,
    dropout: nn.Module | None = None,
) -> tuple[
    Float[Tensor, "*batch time d_v"], Float[Tensor, "*batch time key_time"]
]:
    """Compute softmax(Q K^T / sqrt(d_k)) V.

    Differs from the original, The Annotated Transformer: a masked score is
    -inf, which every dtype has and no learned score can reach; p_attn is
    returned before dropout, when it still sums to one.

    Args:
        query: what each position looks for.
        key: what each position can be found by.
        value: what each position gives if it is found.
        mask: 0 or False where a query must not see a key; None hides nothing.
            A query that sees no key gets NaN, the value of 0 / 0;
            combine_masks raises an error for such a mask.
        dropout: applied to the probabilities.

    Returns:
        The weighted values, and the probabilities p_attn.

    Source: Vaswani et al. 2017 (Attention Is All You Need), equation 1.
    """
    d_k = query.size(-1)
    # scores is the largest tensor here: scale the query instead, mask in place
    scores = query / math.sqrt(d_k) @ key.transpose(-2, -1)
    if mask is not None:
        scores.masked_fill_(mask == 0, float("-inf"))
    p_attn = scores.softmax(dim=-1)
    weights = p_attn if dropout is None else dropout(p_attn)
    return weights @ value, p_attn
