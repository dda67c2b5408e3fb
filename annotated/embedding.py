"""Token embeddings, and the sinusoidal encoding of positions."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Embeddings(nn.Module):
    """Look each token up, and scale by sqrt(d_model).

    Args:
        d_model: width of the vectors.
        vocab_size: number of tokens.

    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.4.
    """

    def __init__(self, d_model: int, vocab_size: int):
        super().__init__()
        self.lut = nn.Embedding(vocab_size, d_model)
        self.d_model = d_model

    def forward(
        self, x: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time d_model"]:
        """Return lut(x) * sqrt(d_model)."""
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Add sines and cosines of the position, then apply dropout.

    Differs from the original, The Annotated Transformer: d_model may be odd,
    pe is rounded once, from float64, and too long a text raises an error.

    Args:
        d_model: width of the vectors.
        dropout: probability of zeroing an element of the sum.
        max_len: number of positions in the table `pe`, a buffer of shape
            (1, max_len, d_model).

    Source: Vaswani et al. 2017, section 3.5.
    """

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)

        position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
        div_term = torch.exp(
            torch.arange(0, d_model, 2, dtype=torch.float64)
            * -(math.log(10000.0) / d_model)
        )
        pe = torch.zeros(max_len, d_model, dtype=torch.float64)
        pe[:, 0::2] = torch.sin(position * div_term)
        # With an odd d_model, there is one more sine than cosines.
        pe[:, 1::2] = torch.cos(position * div_term[: d_model // 2])
        pe = pe.unsqueeze(0).to(torch.get_default_dtype())
        self.register_buffer("pe", pe)

    def forward(
        self, x: Float[Tensor, "batch time d_model"]
    ) -> Float[Tensor, "batch time d_model"]:
        """Return dropout(x + pe), with pe cut to the length of x.

        Raises:
            ValueError: for more positions than the table has.
        """
        if x.size(1) > self.pe.size(1):
            raise ValueError(
                f"a sequence of {x.size(1)} tokens is longer than the "
                f"{self.pe.size(1)} positions of the model"
            )
        return self.dropout(x + self.pe[:, : x.size(1)])
