"""The whole decoder, and the functions that build it from its parts."""

import copy
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from gpt_duet.config import ACTIVATIONS, GPTConfig, activation_name
from gpt_duet.masks import subsequent_mask

from .attention import MultiHeadedAttention
from .block import DecoderLayer
from .cache import CachedDecoder
from .embedding import Embeddings, PositionalEncoding
from .feed_forward import PositionwiseFeedForward
from .layers import LayerNorm, Norm, clones


class Decoder(nn.Module):
    """N layers and a last norm.

    Args:
        layer: the layer that is cloned.
        N: number of layers.
        norm: class of the last norm.

    Source: The Annotated Transformer, "Decoder".
    """

    def __init__(self, layer: DecoderLayer, N: int, norm: Norm = LayerNorm):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = norm(layer.size)

    def forward(
        self,
        x: Float[Tensor, "batch time d_model"],
        mask: Shaped[Tensor, "#batch #time time"] | None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Pass x and the mask through each layer in turn."""
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Generator(nn.Module):
    """A linear map to the vocabulary, and log-softmax.

    Args:
        d_model: width of the features.
        vocab: number of tokens.

    Source: The Annotated Transformer, "Model Architecture".
    """

    def __init__(self, d_model: int, vocab: int):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(
        self, x: Float[Tensor, "... d_model"]
    ) -> Float[Tensor, "... vocab"]:
        """Return log-probabilities, not probabilities."""
        return F.log_softmax(self.proj(x), dim=-1)


class DecoderModel(nn.Module):
    """Embeddings, decoder and generator.

    As in the original, `forward` stops before the generator: it returns
    hidden states, and `generator` or `log_probs` make them a prediction.

    Args:
        decoder: called as decoder(x, mask).
        embed: embeddings followed by the positional encoding.
        generator: from hidden states to log-probabilities.

    Source: "The Transformer architecture of GPT models", after The
    Annotated Transformer's EncoderDecoder.
    """

    config: GPTConfig  # set by make_model; weights do not show all of it

    def __init__(
        self, decoder: Decoder, embed: nn.Sequential, generator: Generator
    ):
        super().__init__()
        self.embed = embed
        self.decoder = decoder
        self.generator = generator

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.generator.proj.out_features

    @property
    def block_size(self) -> int:
        """Longest sequence, in tokens: the rows of the position table."""
        return self.embed[1].pe.size(1)

    def forward(
        self,
        x: Int[Tensor, "batch time"],
        mask: Shaped[Tensor, "#batch #time time"] | None = None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Return the hidden states of `decode`."""
        return self.decode(x, mask)

    def decode(
        self,
        x: Int[Tensor, "batch time"],
        mask: Shaped[Tensor, "#batch #time time"] | None = None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Return hidden states; without a mask, the causal one is used."""
        if mask is None:
            mask = subsequent_mask(x.size(1), device=x.device)
        return self.decoder(self.embed(x), mask)

    def log_probs(
        self, tokens: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the log-probabilities of each position's next token.

        Raises:
            ValueError: for more than block_size tokens.
        """
        return self.generator(self.decode(tokens))

    def next_log_probs(
        self, tokens: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return log-probabilities at the last position only."""
        return self.generator(self.decode(tokens)[:, -1])

    def with_cache(self) -> CachedDecoder:
        """Return what reads a text in pieces, each token once."""
        return CachedDecoder(self)


def make_model(
    vocab_size: int,
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
    norm: Norm = LayerNorm,
    activation: Callable[[Tensor], Tensor] | str = F.relu,
    max_len: int = 5000,
) -> DecoderModel:
    """Build a model from its parts; the defaults are the paper's sizes.

    Differs from the original: the dropout reaches the attention too. Two of
    its faults are kept, so that the same seed gives the same weights, and
    `build_model` corrects both: the clones are drawn again in their matrices
    only, so all layers start with the same biases; and the embedding is
    Xavier-initialised, so that with a large vocabulary a token's vector
    starts out smaller than its position's.

    Args:
        vocab_size: number of tokens.
        N: number of layers.
        d_model: width of the features.
        d_ff: width inside the feed-forward networks.
        h: number of heads.
        dropout: of every part.
        norm: class of the normalisation, called with d_model.
        activation: of the feed-forward networks; a function, a module or
            one of gpt_duet.config's names.
        max_len: number of positions, the model's block_size.

    Raises:
        ValueError: for sizes that do not fit together.

    Source: The Annotated Transformer, "Full Model".
    """
    c = copy.deepcopy
    name = activation_name(activation)
    config = GPTConfig(vocab_size, max_len, N, h, d_model, d_ff, dropout, name)
    attn = MultiHeadedAttention(h, d_model, dropout)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout, ACTIVATIONS[name]())
    position = PositionalEncoding(d_model, dropout, max_len)
    model = DecoderModel(
        Decoder(DecoderLayer(d_model, c(attn), c(ff), dropout, norm), N, norm),
        nn.Sequential(Embeddings(d_model, vocab_size), c(position)),
        Generator(d_model, vocab_size),
    )
    model.config = config
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return model


def build_model(config: GPTConfig, norm: Norm = LayerNorm) -> DecoderModel:
    """Build this style's model for a config, ready to be trained.

    After make_model's draws the biases are set to zero and the embedding to
    a normal distribution that sqrt(d_model) scales to one. The generator
    is never tied to the embedding, whatever config.tie_weights says.

    Args:
        config: sizes, dropout, activation and eps.
        norm: class of the normalisation.
    """
    if config.norm_eps is not None:
        norm = partial(norm, eps=config.norm_eps)
    model = make_model(
        config.vocab_size,
        N=config.n_layer,
        d_model=config.n_embd,
        d_ff=config.inner_size,
        h=config.n_head,
        dropout=config.dropout,
        norm=norm,
        activation=config.activation,
        max_len=config.block_size,
    )
    model.config = config
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.embed[0].lut.weight, std=config.n_embd**-0.5)
    return model
