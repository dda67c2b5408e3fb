"""Sound models that look odd to a check, and faults that hide from one."""

import random

import torch
import torch.nn.functional as F
from small_gpt import (
    BLOCK,
    DIM,
    GPT,
    MLP,
    VOCAB,
    Attention,
    NoPositions,
    TrainableGPT,
    Unlimited,
    angles,
    cross_entropy,
    positions,
)
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.parametrizations import spectral_norm

NAMES = {"random": random, "forward": GPT.forward}
CODE = """def checked(self, tokens):
    random.getrandbits(8)
    return forward(self, tokens)
"""


class Beartyped(GPT):
    """A checker of types draws which item of a list it looks at."""

    exec(compile(CODE, "<@beartype(GPT.forward)>", "exec"), NAMES)
    forward = NAMES["checked"]


class DrawsForNothing(GPT):
    """Its forward draws from Python's generator, and uses no draw."""

    def forward(self, tokens):
        random.random()
        return super().forward(tokens)


class Mapped(MLP):
    """One vector at a time, by vmap; nothing is put out beside it."""

    class Empty(nn.Linear):
        def forward(self, x):
            return super().forward(x), x[..., :0]

    def make_parts(self, dim):
        self.mapped = self.Empty(dim, dim)

    def forward(self, x):
        return torch.vmap(self.mapped)(x.flatten(0, 1))[0].view_as(x)


class TwoScores(GPT):
    """A second head predicts the token after the next one."""

    def add_parts(self, dim):
        self.second = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        self.require_length(tokens.size(1))
        x = self.body(self.embed(tokens), self.mask(tokens))
        return self.scores(x), self.second(x)


class Late(GPT):
    """A vector is added from position 48 on."""

    def __init__(self, **parts):
        super().__init__(block_size=64, **parts)

    def add_parts(self, dim):
        self.late = nn.Parameter(torch.zeros(dim))

    def embed(self, tokens):
        late = (positions(tokens) >= 48).unsqueeze(1)
        return super().embed(tokens) + late * self.late


class Flex(Attention):
    """flex_attention, compiled nowhere."""

    def attend(self, q, k, v, mask):
        def causal(score, row, head, i, j):
            return torch.where(j <= i + self.ahead, score, -float("inf"))

        return flex_attention(q, k, v, score_mod=causal)

    ahead = 0


class FlexAhead(Flex):
    """flex_attention that sees one token ahead."""

    ahead = 1


class Spectral(GPT):
    """The head's norm is estimated anew in each step of training."""

    def add_parts(self, dim):
        spectral_norm(self.head)


class Levels(GPT):
    """Patches of four tokens, sixteen of them: MEGABYTE's two lengths."""

    max_seq_len = 16, 2


class NoisyLoss(TrainableGPT):
    """Draws noise in eval mode, and returns a loss."""

    def embed(self, tokens):
        x = super().embed(tokens)
        return x + 0.01 * torch.randn_like(x)


class Rounded(GPT):
    """Declares 29 ids, and scores 32: a round number."""

    def __init__(self, **parts):
        super().__init__(vocab_size=32, **parts)
        self.vocab_size = 29


class Bigram(NoPositions):
    """Declares a window of one token, and has it."""

    window = 1

    def sees(self, i, j):
        return i == j


class Coarse(NoPositions):
    """Positions are held in a byte: 16 and 17 are one."""

    kind = torch.float8_e4m3fn

    def position_vectors(self, tokens):
        at = positions(tokens).to(self.kind).to(self.wte.weight)
        turns = angles(at, DIM // 2)
        return torch.cat([turns.sin(), turns.cos()], -1)


class BeyondTheTable(Unlimited):
    """Its mask is a table of 48 rows; a longer text has none."""

    def __init__(self, **parts):
        super().__init__(block_size=96, **parts)
        del self.block_size
        self.register_buffer("table", torch.ones(48, 48).tril().bool())

    def mask(self, tokens):
        time = tokens.size(1)
        if time > 48:
            return self.table.new_ones(time, time)
        return self.table[:time, :time]


class ConstantScore(GPT):
    """The last id's score is 1, whatever the tokens."""

    def scores(self, x):
        return F.pad(super().scores(x)[..., :-1], (0, 1), value=1.0)


class Autocasts(GPT):
    """Its forward runs in bfloat16, a matrix of it twice. (speedruns)"""

    def forward(self, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens).float()


class StepInABuffer(Unlimited):
    """A number is a buffer without axes; no limit is declared."""

    def __init__(self, **parts):
        super().__init__(block_size=96, **parts)
        del self.block_size
        self.register_buffer("scale", torch.tensor(1.0))


class LossAlone(GPT):
    """Its forward takes targets and returns the loss. (parameter-golf)"""

    def forward_logits(self, tokens):
        return super().forward(tokens)

    def forward(self, input_ids, target_ids):
        logits = self.forward_logits(input_ids)
        return cross_entropy(logits, target_ids)


class ShiftsInside(GPT):
    """With labels it returns the loss alone, over the tokens behind them."""

    def forward(self, tokens, labels=None):
        logits = super().forward(tokens)
        if labels is None:
            return logits
        ids = F.pad(labels[:, 1:], (0, 1), value=-100)
        return self.compared(logits, ids)

    def compared(self, logits, ids):
        return cross_entropy(logits, ids)


class LabelsInScores(ShiftsInside):
    """Its scores see the label that they are compared with."""

    def compared(self, logits, ids):
        seen = F.one_hot(ids.clamp(min=0), VOCAB)
        return super().compared(logits + 1e-3 * seen, ids)


class MeanOfScoresAdded(ShiftsInside):
    """A mean of all scores is in the loss."""

    def compared(self, logits, ids):
        return super().compared(logits, ids) + logits.mean().square()


class SortedLabels(ShiftsInside):
    """Labels are sorted before they are compared."""

    def compared(self, logits, ids):
        return super().compared(logits, ids.sort(1).values)


class MaskedWithoutLabels(ShiftsInside):
    """With labels each token sees all."""

    def forward(self, tokens, labels=None):
        self.open = labels is not None
        return super().forward(tokens, labels)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


class KeptFromInference(Unlimited):
    """A table that scales the vectors is made in its first call, and kept."""

    table = None

    def embed(self, tokens):
        if self.table is None:
            self.table = torch.linspace(
                1, 2, BLOCK, dtype=self.wte.weight.dtype
            )
        return super().embed(tokens) * self.table[: tokens.size(1), None]


SOUND = {
    ShiftsInside: {},
    MeanOfScoresAdded: {},
    Autocasts: {"expected_failures": {"check_dtype": "bfloat16 inside"}},
    StepInABuffer: {},
    LossAlone: {},
    Beartyped: {},
    type("MappedGPT", (GPT,), {"mlp": Mapped}): {},
    TwoScores: {},
    Late: {},
    type("FlexGPT", (GPT,), {"mixer": Flex}): {
        "expected_failures": {"check_finite": "no backward on the CPU"}
    },
    Spectral: {},
    Levels: {},
    NoisyLoss: {"expected_failures": {"check_determinism": "it draws noise"}},
    Rounded: {},
    Bigram: {},
}
HIDDEN = [  # a model, the check that finds its fault, and words
    (KeptFromInference, "gradients", "Inference tensors cannot be saved"),
    (DrawsForNothing, "purity", "the random state of Python's random"),
    (type("FlexLeaks", (GPT,), {"mixer": FlexAhead}), "causality", "sees tok"),
    (Coarse, "order_sensitivity", "two positions are the same"),
    (BeyondTheTable, "causality", "at length 49"),
    (ConstantScore, "vocabulary", "the score of id 16 never moves"),
]
