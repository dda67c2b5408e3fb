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

    As in The Annotated Transformer, `forward` returns hidden states, which
    `generator` turns into log-probabilities; `log_probs` does both.

    Args:
        decoder: called as decoder(x, mask).
        embed: embeddings followed by the positional encoding.
        generator: turns hidden states into log-probabilities.

    Source: "The Transformer architecture of GPT models", after The
    Annotated Transformer's EncoderDecoder.
    """

    config: GPTConfig  # set by make_model: weights do not show all of it

    def __init__(
        self, decoder: Decoder, embed: nn.Sequential, generator: Generator
    ):
        super().__init__()
        self.embed = embed
        self.decoder = decoder
        self.generator = generator

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        return self.generator.proj.out_features

    @property
    def block_size(self) -> int:
        """Return the length of the longest text: the rows of the table pe."""
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
        """Return hidden states; None as the mask means the causal mask."""
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
        """Return log-probabilities of only the last position."""
        return self.generator(self.decode(tokens)[:, -1])

    def with_cache(self) -> CachedDecoder:
        """Return a decoder that reads a text in pieces, each token once."""
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
    """Build a model from its parts; the default sizes are Vaswani et al.'s.

    Differs from the original, The Annotated Transformer: dropout also applies
    to the attention. Two of its faults are kept, so that a seed gives its
    weights; `build_model` corrects both. First, only the clones' matrices are
    drawn again, so all layers start with the same biases. Second, Xavier's
    initialisation makes the token vectors of a large vocabulary smaller than
    the position vectors.

    Args:
        vocab_size: number of tokens.
        N: number of layers.
        d_model: width of the features.
        d_ff: width inside the feed-forward networks.
        h: number of heads.
        dropout: probability of dropout in every part.
        norm: class of the normalisation, called with d_model.
        activation: activation of the feed-forward networks: a function, a
            module or a name of gpt_duet.config.
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

    After make_model, biases are set to zero. The embedding is drawn so that
    its entries, times sqrt(d_model), are normal with a deviation of one. The
    generator is never tied to the embedding; config.tie_weights is ignored.

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
