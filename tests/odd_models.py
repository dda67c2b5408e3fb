"""Sound models that look odd to a check, and faults that hide from one."""

import random

import torch
import torch.nn.functional as F
from correct_models import turned
from small_gpt import (
    DIM,
    GPT,
    MLP,
    VOCAB,
    Attention,
    NoPositions,
    TrainableGPT,
    Unlimited,
    angles,
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


class NoiseAndBuffer(GPT):
    """Draws noise in eval mode, and has a buffer."""

    def add_parts(self, dim):
        self.register_buffer("turn", torch.randn(dim, dim) / 4)

    def scores(self, x):
        return super().scores(x + 0.01 * torch.randn_like(x) + x @ self.turn)


class EachThirdCall(GPT):
    """Counts its calls, and adds 1 in each third."""

    calls = 0

    def scores(self, x):
        self.calls += 1
        return super().scores(x) + (self.calls % 3 == 0)


class PositionsOfTheBatch(NoPositions):
    """Rotary positions go on from row to row: only differences count."""

    class mixer(Attention):
        def attend(self, q, k, v, mask):
            rows, _, time, width = q.shape
            at = torch.arange(rows * time).view(rows, 1, time, 1).to(q)
            by = at * 1e4 ** -torch.linspace(0, 1, width // 2).to(q)
            q, k = turned(4 * q, by), turned(4 * k, by)
            return super().attend(q, k, 4 * v, mask)

    def __init__(self, **parts):
        super().__init__(block_size=24, dim=64, **parts)


class MaskOfFourAxes(GPT):
    """Its attention mask says for each query and key whether it is seen."""

    def forward(self, tokens, attention_mask=None):
        self.require_length(tokens.size(1))
        mask = attention_mask
        if mask is None:
            mask = self.mask(tokens)
        return self.scores(self.body(self.embed(tokens), mask.bool()))


class RouterMoves(MLP):
    """In train mode the router's bias moves towards equal loads."""

    def add_parts(self, dim):
        self.router = nn.Linear(dim, 4)
        self.into = nn.Parameter(torch.randn(4, dim, dim) / 4)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        p = self.router(x).sigmoid()
        chosen = (p + self.bias).topk(2, -1).indices
        if self.training:
            load = F.one_hot(chosen, 4).sum((0, 1, 2)).to(x)
            with torch.no_grad():
                self.bias += 0.1 * (load.mean() - load).sign()
        gate = p.gather(-1, chosen).unsqueeze(-1)
        y = x.unsqueeze(-2).unsqueeze(-2) @ self.into[chosen]
        return super().forward(x) + (gate * y.squeeze(-2)).sum(-2)


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


SOUND = {
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
    NoiseAndBuffer: {
        "expected_failures": {"check_determinism": "it draws noise"}
    },
    EachThirdCall: {
        "expected_failures": {"check_determinism": "it counts calls"}
    },
    PositionsOfTheBatch: {},
    MaskOfFourAxes: {},
    type("RouterMovesGPT", (TrainableGPT,), {"mlp": RouterMoves}): {},
    Rounded: {},
    Bigram: {},
}
HIDDEN = [  # a model, the check that finds its fault, and words
    (DrawsForNothing, "purity", "the random state of Python's random"),
    (type("FlexLeaks", (GPT,), {"mixer": FlexAhead}), "causality", "sees tok"),
    (Coarse, "order_sensitivity", "two positions are the same"),
    (BeyondTheTable, "causality", "at length 49"),
    (ConstantScore, "vocabulary", "the score of id 16 never moves"),
]
