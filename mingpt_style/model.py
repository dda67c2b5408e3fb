"""The whole GPT in one class."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gpt_duet.config import GPTConfig

from .attention import KeyValueCache
from .block import Block, layer_norm

Cache = list[KeyValueCache]  # a cache for each block


class GPT(nn.Module):
    """Token and position tables, blocks, a last norm, a head.

    Args:
        config: the sizes; with tie_weights the head is the token table.

    Source: minGPT and nanoGPT, model.py; Radford et al. 2019 (GPT-2).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(
                    Block(config) for _ in range(config.n_layer)
                ),
                "ln_f": layer_norm(config),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight

        self.apply(self._init_weights)
        # each block adds to x twice: a smaller std bounds the variance of x
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                std = 0.02 / math.sqrt(2 * config.n_layer)
                nn.init.normal_(p, mean=0.0, std=std)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        idx: Int[Tensor, "batch time"],
        targets: Int[Tensor, "batch time"] | None = None,
    ) -> tuple[Float[Tensor, "batch time vocab"], Float[Tensor, ""] | None]:
        """Return the logits of all positions, and the loss if given targets.

        Args:
            idx: ids of the tokens.
            targets: ids of the next tokens, or -1 to ignore a position; the
                logits do not depend on them.

        Raises:
            ValueError: for more than block_size tokens, or if targets and
                tokens have different shapes.
        """
        logits = self.lm_head(self.hidden(idx))
        loss = None
        if targets is not None:
            if targets.shape != idx.shape:
                raise ValueError(
                    f"targets of shape {tuple(targets.shape)} for tokens "
                    f"of shape {tuple(idx.shape)}"
                )
            loss = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=-1
            )
        return logits, loss

    def hidden(
        self, idx: Int[Tensor, "batch time"], cache: Cache | None = None
    ) -> Float[Tensor, "batch time n_embd"]:
        """Return the final hidden states, before the head."""
        blocks = self.transformer.h
        x = self.embed(idx, 0 if cache is None else cache[0].length)
        caches: list = cache or [None] * len(blocks)
        for block, layer_cache in zip(blocks, caches, strict=True):
            x = block(x, layer_cache)
        return self.transformer.ln_f(x)

    def embed(
        self, idx: Int[Tensor, "batch time"], start: int = 0
    ) -> Float[Tensor, "batch time n_embd"]:
        """Return wte[token] + wpe[position]; positions count from start."""
        T = start + idx.size(1)
        if T > self.block_size:
            raise ValueError(
                f"a sequence of {T} tokens is longer than the "
                f"{self.block_size} positions of the model"
            )
        pos = torch.arange(start, T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        return self.transformer.drop(x)

    def log_probs(
        self, tokens: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the log-probabilities of each position's next token.

        Raises:
            ValueError: for more than block_size tokens.
        """
        return F.log_softmax(self.lm_head(self.hidden(tokens)), dim=-1)

    def next_log_probs(
        self, tokens: Int[Tensor, "batch time"], cache: Cache | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Return log-probabilities of only the last position.

        Run it under torch.no_grad() if it gets a cache, as `decode` does.
        """
        x = self.hidden(tokens, cache)[:, -1]
        return F.log_softmax(self.lm_head(x), dim=-1)

    def init_cache(self, batch: int) -> Cache:
        """Return an empty cache for block_size tokens in each row."""
        config = self.config
        hs = config.n_embd // config.n_head
        size = (batch, config.n_head, config.block_size, hs)
        like = self.lm_head.weight
        return [KeyValueCache(like, size) for _ in self.transformer.h]

    @torch.no_grad()
    def decode(
        self, tokens: Int[Tensor, "batch time"], cache: Cache
    ) -> Float[Tensor, "batch time vocab"]:
        """Return log_probs of tokens that follow the tokens in the cache.

        The tokens are added to the cache. The pieces of a text have the same
        log_probs as the whole text.

        Raises:
            ValueError: for more than block_size tokens in all, or another
                number of rows than the cache has.
        """
        rows = cache[0].k.size(0)
        if tokens.size(0) != rows:
            raise ValueError(
                f"the cache is for {rows} rows, got {tokens.size(0)}"
            )
        return F.log_softmax(self.lm_head(self.hidden(tokens, cache)), dim=-1)


def build_model(config: GPTConfig) -> GPT:
    """Build this style's model for a config, ready to be trained."""
    return GPT(config)
