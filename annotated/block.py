"""One decoder layer: two sublayers, each with its residual connection."""

from collections.abc import Callable

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .layers import LayerNorm, Norm, clones


class SublayerConnection(nn.Module):
    """Add to x the sublayer's output for the normalised x.

    The norm comes before the sublayer, as in The Annotated Transformer's
    code; Vaswani et al. normalise the sum x + sublayer(x).

    Args:
        size: width of the features.
        dropout: probability of zeroing an element of the sublayer's output.
        norm: class of the normalisation.

    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.1.
    """

    def __init__(self, size: int, dropout: float, norm: Norm = LayerNorm):
        super().__init__()
        self.norm = norm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch time d_model"],
        sublayer: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "batch time d_model"]:
        """Return x + dropout(sublayer(norm(x)))."""
        return x + self.dropout(sublayer(self.norm(x)))


class DecoderLayer(nn.Module):
    """Self-attention, then the feed-forward network.

    Args:
        size: width of the features.
        self_attn: called as self_attn(query, key, value, mask).
        feed_forward: called as feed_forward(x).
        dropout: dropout probability of both residual connections.
        norm: class of the normalisation.

    Source: Vaswani et al. 2017, figure 1, without the attention to an
    encoder.
    """

    def __init__(
        self,
        size: int,
        self_attn: nn.Module,
        feed_forward: nn.Module,
        dropout: float,
        norm: Norm = LayerNorm,
    ):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm), 2)

    def forward(
        self,
        x: Float[Tensor, "batch time d_model"],
        mask: Shaped[Tensor, "#batch #time time"] | None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Apply self-attention, then the feed-forward network."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)
