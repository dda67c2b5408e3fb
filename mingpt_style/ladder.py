"""Eight models of a lecture, from a bigram table to a GPT.

Each model is a rung of the ladder: it adds one part to the previous model.
Unlike in the lecture's notebook, sizes come from the config, never from
globals, and a sequence that is too long raises an error.

Source: the lecture "Let's build GPT".
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gpt_duet.config import GPTConfig

from .block import layer_norm
from .ladder_heads import Head, MultiHead

Tokens = Int[Tensor, "batch time"]
Stream = Float[Tensor, "batch time n_embd"]
Scores = Float[Tensor, "batch time vocab"]


class Rung(nn.Module):
    """The base class of all models of the ladder, which define `logits`."""

    logits: Callable[[Tensor], Tensor]

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size

    def forward(
        self, idx: Tokens, targets: Tokens | None = None
    ) -> tuple[Scores, Float[Tensor, ""] | None]:
        """Return the logits of all positions, and the loss if given targets.

        Raises:
            ValueError: for more than block_size tokens.
        """
        T = idx.size(1)
        if T > self.block_size:
            raise ValueError(
                f"a sequence of {T} tokens is longer than the "
                f"{self.block_size} positions of the model"
            )
        logits = self.logits(idx)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1
        )

    def log_probs(self, tokens: Tokens) -> Scores:
        """Return the log-probabilities of each position's next token.

        Raises:
            ValueError: for more than block_size tokens.
        """
        return F.log_softmax(self(tokens)[0], dim=-1)


class Bigram(Rung):
    """A table of bigrams: the next character depends only on the last."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def logits(self, idx: Tokens) -> Scores:
        """Look up the row of each token."""
        return self.table(idx)


class Positions(Rung):
    """The sum of a token's and a position's vector is mapped to scores."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)

    def logits(self, idx: Tokens) -> Scores:
        """Embed tokens and positions, run the body, map to scores."""
        pos = torch.arange(idx.size(1), device=idx.device)
        return self.lm_head(self.body(self.wte(idx) + self.wpe(pos)))

    def body(self, x: Stream) -> Stream:
        """Return x: no position sees another position yet."""
        return x


def feed_forward(config: GPTConfig) -> nn.Sequential:
    """Build the feed-forward network, which is four times wider inside."""
    return nn.Sequential(
        nn.Linear(config.n_embd, 4 * config.n_embd),
        nn.ReLU(),
        nn.Linear(4 * config.n_embd, config.n_embd),
        nn.Dropout(config.dropout),
    )


class OneHead(Positions):
    """One attention head: a position gathers from itself and earlier ones."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.attn: nn.Module = Head(config.n_embd, config.n_embd)

    def body(self, x: Stream) -> Stream:
        """Apply attention."""
        return self.attn(x)


class ManyHeads(OneHead):
    """Several heads, which together are as wide as the single head."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.attn = MultiHead(config, project=False)


class FeedForward(ManyHeads):
    """Many heads, then a feed-forward network."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.mlp = feed_forward(config)

    def body(self, x: Stream) -> Stream:
        """Apply attention, then the feed-forward network."""
        return self.mlp(self.attn(x))


class Residual(FeedForward):
    """Each part's output is added to its input; a matrix joins the heads."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.attn = MultiHead(config, project=True)

    def body(self, x: Stream) -> Stream:
        """Add attention's output, then the feed-forward network's."""
        x = x + self.attn(x)
        return x + self.mlp(x)


class NormedBlock(nn.Module):
    """Attention and feed-forward; each normalises its input and adds to x."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1, self.ln_2 = layer_norm(config), layer_norm(config)
        self.attn = MultiHead(config, project=True)
        self.mlp = feed_forward(config)

    def forward(self, x: Stream) -> Stream:
        """Add attention's output, then the feed-forward network's."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Normed(Positions):
    """A layer norm before each part, and one before the map to scores."""

    layers = 1  # number of blocks; 0: as many as the config has

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        n = self.layers or config.n_layer
        self.blocks = nn.Sequential(*(NormedBlock(config) for _ in range(n)))
        self.ln_f = layer_norm(config)

    def body(self, x: Stream) -> Stream:
        """Pass x through every block, then normalise it."""
        return self.ln_f(self.blocks(x))


class FullGPT(Normed):
    """Several blocks (config.n_layer), one after another: the GPT.

    Each block has its own weights, so that n_layer blocks have n_layer times
    as many parameters as one block.
    """

    layers = 0


# All models in order, by the name of the part that each adds.
RUNGS: dict[str, type[Rung]] = {
    "bigram table": Bigram,
    "+ positions": Positions,
    "+ attention head": OneHead,
    "+ more heads": ManyHeads,
    "+ feed forward": FeedForward,
    "+ residual": Residual,
    "+ layer norm": Normed,
    "GPT": FullGPT,
}
