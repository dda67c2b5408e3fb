"""From a bigram table to a GPT, one idea a rung.

Each rung adds one thing to the rung before and keeps the contract of every
model here. Where the lecture's notebook was wrong it differs: sizes come
from the config, never from globals, and what is too long is refused.

Source: the lecture "Let's build GPT".
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gpt_duet.config import GPTConfig

from .block import layer_norm
from .heads import Head, MultiHead

Tokens = Int[Tensor, "batch time"]
Stream = Float[Tensor, "batch time n_embd"]
Scores = Float[Tensor, "batch time vocab"]


class Rung(nn.Module):
    """What every rung shares; each brings its own `logits`."""

    logits: Callable[[Tensor], Tensor]

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size

    def forward(
        self, idx: Tokens, targets: Tokens | None = None
    ) -> tuple[Scores, Float[Tensor, ""] | None]:
        """Return the logits of every position, and the loss if asked.

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
    """A table: each token alone says what follows."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def logits(self, idx: Tokens) -> Scores:
        """Look the row of the token up."""
        return self.table(idx)


class Positions(Rung):
    """Vectors of tokens and positions, and a head that reads them (v2)."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)

    def logits(self, idx: Tokens) -> Scores:
        """Embed, let the positions talk, read."""
        pos = torch.arange(idx.size(1), device=idx.device)
        return self.lm_head(self.body(self.wte(idx) + self.wpe(pos)))

    def body(self, x: Stream) -> Stream:
        """Nothing yet: each position is on its own."""
        return x


def feed_forward(config: GPTConfig) -> nn.Sequential:
    """Build the four times wider network that thinks about what it heard."""
    return nn.Sequential(
        nn.Linear(config.n_embd, 4 * config.n_embd),
        nn.ReLU(),
        nn.Linear(4 * config.n_embd, config.n_embd),
        nn.Dropout(config.dropout),
    )


class OneHead(Positions):
    """Positions that listen to their past, through one head (v3)."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.attn: nn.Module = Head(config.n_embd, config.n_embd)

    def body(self, x: Stream) -> Stream:
        """Attend."""
        return self.attn(x)


class ManyHeads(OneHead):
    """As wide, but in several heads: several conversations."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.attn = MultiHead(config, project=False)


class Thinking(ManyHeads):
    """Many heads, then a feed-forward network."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.mlp = feed_forward(config)

    def body(self, x: Stream) -> Stream:
        """Attend, then think."""
        return self.mlp(self.attn(x))


class Residual(Thinking):
    """The same, added to a stream that passes both by."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.attn = MultiHead(config, project=True)

    def body(self, x: Stream) -> Stream:
        """Add what was heard, then what was thought."""
        x = x + self.attn(x)
        return x + self.mlp(x)


class NormedBlock(nn.Module):
    """The two residual lines, each with a layer norm in front."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1, self.ln_2 = layer_norm(config), layer_norm(config)
        self.attn = MultiHead(config, project=True)
        self.mlp = feed_forward(config)

    def forward(self, x: Stream) -> Stream:
        """Add what was heard, then what was thought."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Normed(Positions):
    """One block with layer norms, and a norm before the head."""

    layers = 1  # 0: as many as the config has

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        n = self.layers or config.n_layer
        self.blocks = nn.Sequential(*(NormedBlock(config) for _ in range(n)))
        self.ln_f = layer_norm(config)

    def body(self, x: Stream) -> Stream:
        """Pass the stream through every block, and normalise its sum."""
        return self.ln_f(self.blocks(x))


class FullGPT(Normed):
    """As many blocks as the config has: the notebook's GPT."""

    layers = 0


# From the ground up, with what each adds.
RUNGS: dict[str, type[Rung]] = {
    "bigram table": Bigram,
    "+ positions and a head": Positions,
    "one attention head": OneHead,
    "many heads": ManyHeads,
    "+ feed forward": Thinking,
    "+ residual": Residual,
    "+ layer norm": Normed,
    "GPT": FullGPT,
}
