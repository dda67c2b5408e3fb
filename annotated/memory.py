"""Reading a text in pieces: attention that remembers keys and values."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gpt_duet.masks import subsequent_mask

from .attention import MultiHeadedAttention, attention


class RememberingAttention:
    """A layer's attention, to new tokens and to all that were read before.

    It is a sublayer, as SublayerConnection takes one; the layer's own
    attention has the weights, and is left as it is.
    """

    def __init__(self, attn: MultiHeadedAttention, batch: int):
        empty = attn.linears[0].weight.new_empty(batch, attn.h, 0, attn.d_k)
        self.attn, self.key, self.value = attn, empty, empty

    def __call__(
        self,
        x: Float[Tensor, "batch time d_model"],
        mask: Shaped[Tensor, "1 1 time key_time"],
    ) -> Float[Tensor, "batch time d_model"]:
        """Project the new tokens alone, remember them, attend to all."""
        attn = self.attn
        query, key, value = (
            linear(x).unflatten(-1, (attn.h, attn.d_k)).transpose(1, 2)
            for linear in attn.linears[:3]
        )
        self.key = torch.cat([self.key, key], dim=2)
        self.value = torch.cat([self.value, value], dim=2)
        x, _ = attention(query, self.key, self.value, mask, attn.dropout)
        return attn.linears[-1](x.transpose(1, 2).flatten(-2))


class Memory:
    """Holds the ids that were read, and each layer's keys and values."""

    def __init__(self, layers: Any, batch: int):
        attends = [RememberingAttention(a.self_attn, batch) for a in layers]
        self.layers = list(zip(layers, attends, strict=True))
        self.tokens = attends[0].key.new_empty(batch, 0, dtype=torch.long)


class Reader:
    """Reads a text in pieces, each token once, with a DecoderModel's parts."""

    def __init__(self, model: Any):
        self.model = model

    def init_cache(self, batch: int) -> Memory:
        """Return an empty memory for so many rows."""
        return Memory(self.model.decoder.layers, batch)

    @torch.no_grad()
    def decode(
        self, tokens: Int[Tensor, "batch time"], cache: Memory
    ) -> Float[Tensor, "batch time vocab"]:
        """Return log_probs of tokens that go on where the memory ends.

        Raises:
            ValueError: for more than block_size tokens in all, and for
                another number of rows than the memory has.
        """
        return self.model.generator(self._hidden(tokens, cache))

    @torch.no_grad()
    def next_log_probs(
        self, tokens: Int[Tensor, "batch time"], cache: Memory
    ) -> Float[Tensor, "batch vocab"]:
        """Return those of the last position only."""
        return self.model.generator(self._hidden(tokens, cache)[:, -1])

    def _hidden(self, tokens: Tensor, cache: Memory) -> Tensor:
        model, (rows, past) = self.model, cache.tokens.shape
        if (given := len(tokens)) != rows:
            raise ValueError(f"the memory is for {rows} rows, got {given}")
        text = torch.cat([cache.tokens, tokens], dim=1)
        x = model.embed(text)[:, past:]
        mask = subsequent_mask(text.size(1), device=x.device)[:, None, past:]
        for layer, attend in cache.layers:
            x = layer.sublayer[0](x, partial(attend, mask=mask))
            x = layer.sublayer[1](x, layer.feed_forward)
        cache.tokens = text
        return model.decoder.norm(x)
