"""Decode a text in pieces: each layer keeps its keys and values."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gpt_duet.masks import subsequent_mask

from .attention import MultiHeadedAttention, attention


class CachedAttention:
    """A layer's attention, in which new tokens attend to all tokens so far.

    SublayerConnection calls it like any sublayer. It uses the weights of
    attn, the layer's own attention, and does not change that module.
    """

    def __init__(self, attn: MultiHeadedAttention, batch: int):
        empty = attn.linears[0].weight.new_empty(batch, attn.h, 0, attn.d_k)
        self.attn, self.key, self.value = attn, empty, empty

    def __call__(
        self,
        x: Float[Tensor, "batch time d_model"],
        mask: Shaped[Tensor, "1 1 time key_time"],
    ) -> Float[Tensor, "batch time d_model"]:
        """Project the new tokens, keep keys and values, attend to all."""
        query, key, value = self.attn.project(x, x, x)
        self.key = torch.cat([self.key, key], dim=2)
        self.value = torch.cat([self.value, value], dim=2)
        x, _ = attention(query, self.key, self.value, mask, self.attn.dropout)
        return self.attn.join(x)


class Cache:
    """The ids so far, and each layer with its cached attention."""

    def __init__(self, layers: Any, batch: int):
        attends = [CachedAttention(layer.self_attn, batch) for layer in layers]
        self.layers = list(zip(layers, attends, strict=True))
        self.tokens = attends[0].key.new_empty(batch, 0, dtype=torch.long)


class CachedDecoder:
    """Read a text in pieces, each token once, with a DecoderModel's parts."""

    def __init__(self, model: Any):
        self.model = model

    def init_cache(self, batch: int) -> Cache:
        """Return an empty cache for `batch` rows."""
        return Cache(self.model.decoder.layers, batch)

    @torch.no_grad()
    def decode(
        self, tokens: Int[Tensor, "batch time"], cache: Cache
    ) -> Float[Tensor, "batch time vocab"]:
        """Return log_probs of tokens that follow the tokens in the cache.

        Raises:
            ValueError: for more than block_size tokens in all, or another
                number of rows than the cache has.
        """
        return self.model.generator(self._hidden(tokens, cache))

    @torch.no_grad()
    def next_log_probs(
        self, tokens: Int[Tensor, "batch time"], cache: Cache
    ) -> Float[Tensor, "batch vocab"]:
        """Return log_probs of only the last position."""
        return self.model.generator(self._hidden(tokens, cache)[:, -1])

    def _hidden(self, tokens: Tensor, cache: Cache) -> Tensor:
        model, (rows, past) = self.model, cache.tokens.shape
        if (given := len(tokens)) != rows:
            raise ValueError(f"the cache is for {rows} rows, got {given}")
        text = torch.cat([cache.tokens, tokens], dim=1)
        x = model.embed(text)[:, past:]
        mask = subsequent_mask(text.size(1), device=x.device)[:, None, past:]
        for layer, attend in cache.layers:
            x = layer.sublayer[0](x, partial(attend, mask=mask))
            x = layer.sublayer[1](x, layer.feed_forward)
        cache.tokens = text
        return model.decoder.norm(x)
