"""Correct models of many kinds, each of which must pass all checks.

A method replaces a method of the small GPT, or a class replaces a part of it
or the whole GPT. Each docstring says what is unusual about the model.
"""

import copy
import math
from functools import lru_cache, partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from small_gpt import (
    BLOCK,
    DIM,
    GPT,
    MLP,
    VOCAB,
    Attention,
    Block,
    CachedGPT,
    CacheInside,
    CacheInTheCall,
    CacheWithMask,
    Mixer,
    Model,
    NoPositions,
    Packed,
    Padded,
    Part,
    Past,
    TrainableGPT,
    Unlimited,
    angles,
    collect,
    cross_entropy,
    positions,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

CORRECT = [Model("base", GPT, "The small GPT as it is.")]


def correct(*owner, **details):
    """Return a decorator that adds a correct model to the list."""
    return collect(CORRECT, *owner, **details)


# --- Positions --------------------------------------------------------------


def turned(x, by):
    """Rotate pairs of features at each position by the given angles."""
    cos, sin = by.cos().to(x), by.sin().to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@correct(Attention, "attend", whole=NoPositions)
def rotary(self, q, k, v, mask):
    """Queries and keys are rotated by angles that depend on the position."""
    by = angles(torch.arange(q.size(-2), device=q.device), q.size(-1) // 2)
    return Attention.attend(self, turned(q, by), turned(k, by), v, mask)


@correct(GPT, "embed")
def embedded_copy(self, tokens):
    """Ids are deep-copied before they are embedded."""
    return GPT.embed(self, copy.deepcopy(tokens))


@correct()
class TableByLength(NoPositions):
    """An lru_cache keeps a table of positions for each length."""

    def add_parts(self, dim):
        super().add_parts(dim)
        self.table = lru_cache(
            lambda size: angles(torch.arange(size), dim).sin()
        )

    def position_vectors(self, tokens):
        return self.table(tokens.size(1)).to(self.wte.weight)


@correct()
class HaltsByPosition(GPT):
    """Blocks repeat until all positions have halted; a position that has
    halted changes no more."""

    def add_parts(self, dim):
        self.halt = nn.Linear(dim, 1)
        nn.init.constant_(self.halt.bias, -30.0)

    def body(self, x, mask):
        done = torch.zeros_like(x[..., :1], dtype=torch.bool)
        for _ in range(3):
            halt = self.halt(x)
            further = super().body(x, mask) + F.pad(halt / 30, (0, DIM - 1))
            x, done = torch.where(done, x, further), done | (halt > 0)
            if done.all():
                break
        return x


@correct(loosely="length_limit")
class LimitOfTraining(NoPositions, Unlimited):
    """The model declares a length for training, but its rotary positions have
    no limit."""

    mixer = type("Rotary", (Attention,), {"attend": rotary})


@correct(whole=NoPositions)
class FilledTable(Attention):
    """A rotary table is filled when it is needed, and is not saved."""

    def add_parts(self, dim):
        self.register_buffer("angles", torch.zeros(BLOCK, 4), persistent=False)
        self.filled = 0

    def attend(self, q, k, v, mask):
        size = q.size(-2)
        if self.filled < size:
            at = torch.arange(size, device=q.device)
            self.angles[:size] = angles(at, 4)
            self.filled = size
        by = self.angles[:size]
        return super().attend(turned(q, by), turned(k, by), v, mask)


@correct()
class OneSegment(GPT):
    """The vector of segment 0 is added to all tokens."""

    def add_parts(self, dim):
        self.segments = nn.Embedding(2, dim)

    def embed(self, tokens):
        return super().embed(tokens) + self.segments(torch.zeros_like(tokens))


@correct(Attention, "scores", loosely="signal")
def cosines(self, q, k):
    """Queries and keys have length 1; a constant factor scales the scores."""
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 40


@correct(Attention, "attend", loosely="signal")
def cosines_fused(self, q, k, v, mask):
    """Queries and keys have length 1; a fused kernel has a fixed scale."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=40.0)


@correct(Attention, "hide", whole=NoPositions)
def alibi(self, scores, mask):
    """A key further back gets a lower score."""
    at = torch.arange(scores.size(-1), device=scores.device)
    slope = 0.5 ** torch.arange(1, 3, device=scores.device).view(2, 1, 1)
    bias = (slope * (at - at.unsqueeze(1))).to(scores.dtype)
    return Attention.hide(self, scores + bias, mask)


@correct()
class Sinusoidal(NoPositions):
    """A buffer of sines and cosines holds the positions."""

    def add_parts(self, dim):
        super().add_parts(dim)
        at = angles(torch.arange(BLOCK), dim // 2)
        self.register_buffer("sines", torch.cat([at.sin(), at.cos()], 1))

    def position_vectors(self, tokens):
        return self.sines[: tokens.size(1)]


@correct(GPT, "embed")
def positions_in_place(self, tokens):
    """Positions are added to the tokens' vectors in place."""
    x = self.token_vectors(tokens)
    x += self.position_vectors(tokens)
    return x


@correct(loosely="gradient_flow")
class BehindPadding(Unlimited):
    """Positions start after the padding id, so the first two rows of the table
    are unused. (RoBERTa)"""

    def add_parts(self, dim):
        self.wpe = nn.Embedding(BLOCK + 2, dim, padding_idx=1)
        self.block_size, self.max_len = None, BLOCK + 2

    def position_vectors(self, tokens):
        return self.wpe(positions(tokens) + 2)


@correct(loosely="length_limit")
class BiasByDistance(NoPositions, Unlimited):
    """Each distance has a bias; all distances beyond the table share the
    last one."""

    furthest = BLOCK - 1

    def add_parts(self, dim):
        super().add_parts(dim)
        self.position_bias = nn.Embedding(self.furthest + 1, 2)

    def distances(self, at):
        return at.unsqueeze(1) - at

    def mask(self, tokens):
        at = positions(tokens)
        far = self.distances(at).clamp(0, self.furthest)
        bias = self.position_bias(far).permute(2, 0, 1)
        return bias.masked_fill(at > at.unsqueeze(1), -math.inf).unsqueeze(0)

    mixer = type(
        "Biased", (Attention,), {"hide": lambda _, scores, mask: scores + mask}
    )


@correct(loosely="length_limit order_sensitivity")
class ClippedDistances(BiasByDistance):
    """The model has one layer, where all distances of 8 and more share
    one bias."""

    layers, furthest = 1, 8


@correct(loosely="length_limit order_sensitivity gradient_flow")
class DistancesOfBothSigns(BiasByDistance):
    """Distances are clipped at 9; the table also has rows for the future."""

    furthest = 18

    def distances(self, at):
        return super().distances(at).clamp(-9, 9) + 9


@correct(loosely="length_limit gradient_flow")
class Buckets(BiasByDistance):
    """Large distances share buckets, as in T5; these texts never use the
    last bucket."""

    def distances(self, at):
        far = super().distances(at).clamp(min=1)
        wide = 16 + (far / 16).log() / math.log(8) * 16
        return torch.where(far < 16, super().distances(at), wide.long())


@correct(loosely="gradient_flow")
class PositionsToSpare(GPT):
    """Texts have up to 32 tokens, but two tables have 64 positions."""

    def add_parts(self, dim):
        self.wpe = nn.Embedding(2 * BLOCK, dim)
        self.scale = nn.Parameter(torch.ones(1, 2 * BLOCK, dim))

    def embed(self, tokens):
        return super().embed(tokens) * self.scale[:, : tokens.size(1)]


# --- Attention --------------------------------------------------------------


@correct()
class GroupedQuery(Attention):
    """Four query heads share two key and value heads, in a fused kernel."""

    def add_parts(self, dim):
        self.qkv = nn.Linear(dim, 2 * dim)

    def forward(self, x, mask):
        width = x.size(-1) // 4
        q, k, v = self.qkv(x).split([4 * width, 2 * width, 2 * width], -1)
        q, k, v = (
            y.unflatten(-1, (-1, width)).transpose(1, 2) for y in (q, k, v)
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.merge(y))


@correct()
class SlidingWindow(GPT):
    """The model's one layer sees 8 tokens, and the model declares this."""

    layers, window = 1, 8

    def sees(self, i, j):
        return (j <= i) & (i - j < self.window)


@correct()
class BlockBehind(GPT):
    """In the model's one layer, a token sees its own block of 8 tokens and
    the block before."""

    layers, window = 1, 8

    def sees(self, i, j):
        return (j <= i) & (i // self.window - j // self.window < 2)


@correct()
class WindowInConfig(GPT):
    """Both layers see 6 tokens, as config.sliding_window declares."""

    config = SimpleNamespace(
        sliding_window=6, vocab_size=VOCAB, block_size=BLOCK
    )

    def sees(self, i, j):
        return (j <= i) & (i - j < self.config.sliding_window)


@correct(Attention, "hide")
def finite_mask(self, scores, mask):
    """The mask fills in the lowest finite number, as some libraries do."""
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


@correct(Attention, "attend")
def linear_attention(self, q, k, v, mask):
    """Without softmax, attention is a running sum of keys and values, divided
    by a running sum of keys."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)
    top = (q.unsqueeze(-2) @ state).squeeze(-2)
    return top / (q * k.cumsum(-2)).sum(-1, keepdim=True)


@correct(Attention, "weights", double=False)
def softmax_in_single(self, scores, mask):
    """The softmax is always in float32, even if the model is not."""
    return self.hide(scores, mask).float().softmax(-1).to(scores.dtype)


@correct(Attention, "weights", double=False)
def softmax_in_bfloat16(self, scores, mask):
    """The softmax is always computed in bfloat16."""
    return self.hide(scores, mask).bfloat16().softmax(-1).to(scores.dtype)


@correct(Attention, "weights")
def softmax_by_hand(self, scores, mask):
    """A hand-written softmax first subtracts the largest score."""
    scores = self.hide(scores, mask)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    return shares / shares.sum(-1, keepdim=True)


@correct(Attention, "attend", deep=True)
def top_keys(self, q, k, v, mask):
    """Each query sees only the two keys with the highest scores."""
    scores = self.hide(self.scores(q, k), mask)
    least = scores.topk(min(2, scores.size(-1)), -1).values[..., -1:]
    return self.hide(scores, scores >= least).softmax(-1) @ v


@correct(whole=Padded, double=False)
class MaskAdded(Attention):
    """The mask adds the lowest finite number; the softmax is in float32."""

    def hide(self, scores, mask):
        lowest = torch.finfo(scores.dtype).min
        added = torch.zeros_like(scores).masked_fill(~mask, lowest)
        return (scores + added).float()

    def weights(self, scores, mask):
        return super().weights(scores, mask).to(scores.dtype)


# --- Without attention ------------------------------------------------------


@correct(deep=True)
class Convolution(Mixer):
    """Two layers are convolutions, padded only on the left."""

    def add_parts(self, dim):
        self.conv = nn.Conv1d(dim, dim, 17)

    def forward(self, x, mask):
        return self.conv(F.pad(x.mT, (16, 0))).mT


@correct(open="an FFT mixes its whole axis; zeros hide the later part")
class LongConvolution(Mixer):
    """An FFT convolves the whole text, and is causal up to rounding."""

    def add_parts(self, dim):
        self.kernel = nn.Parameter(torch.randn(BLOCK, dim) / 4)

    def forward(self, x, mask):
        size, dtype = x.size(1), x.dtype
        if dtype in (torch.bfloat16, torch.float16):
            x = x.float()
        kernel = torch.fft.rfft(self.kernel[:size].to(x), n=2 * size, dim=0)
        y = torch.fft.rfft(x, n=2 * size, dim=1) * kernel
        return torch.fft.irfft(y, n=2 * size, dim=1)[:, :size].to(dtype)


@correct()
class LSTM(Part):
    """The model is an LSTM without blocks, and has no longest text."""

    part, vocab_size, cell = None, VOCAB, nn.LSTM

    def add_parts(self, dim):
        self.wte = nn.Embedding(VOCAB, dim)
        self.cells = self.cell(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        return self.head(self.cells(self.wte(input_ids))[0])


# --- Blocks -----------------------------------------------------------------


@correct()
class Experts(Part):
    """Each token goes to two of three experts, and the rounding depends on
    the batch."""

    part = "mlp"

    def add_parts(self, dim):
        self.router = nn.Linear(dim, 3)
        self.experts = nn.ModuleList(MLP(dim) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(0, 1)
        p, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, rank = (chosen == i).nonzero(as_tuple=True)
            gate = p[row, rank].unsqueeze(1)
            out = out.index_add(0, row, gate * expert(flat[row]))
        return out.view_as(x)


@correct(loosely="gradient_flow")
class ExpertsInOne(Part):
    """One tensor holds twelve experts; the router's bias excludes eight."""

    part = "mlp"

    def add_parts(self, dim):
        self.router = nn.Linear(dim, 12)
        self.register_buffer("bias", -99.0 * (torch.arange(12) > 3))
        self.into = nn.Parameter(torch.randn(12, dim, dim) / 4)

    def forward(self, x):
        p = self.router(x).sigmoid()
        chosen = (p + self.bias).topk(2, -1).indices
        gate = p.gather(-1, chosen)
        y = x.unsqueeze(-2).unsqueeze(-2) @ self.into[chosen]
        return (gate.unsqueeze(-1) * y.squeeze(-2)).sum(-2)


@correct(double=False)
class RouterInSingle(Experts):
    """The router of the experts is computed in float32."""

    def add_parts(self, dim):
        super().add_parts(dim)
        self.router = type("Single", (nn.Linear,), {"forward": single})(dim, 3)


def single(self, x):
    """Compute a linear layer in float32."""
    return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x)


@correct()
class WeightsExpanded(Part):
    """One weight of the MLP is a single column that is expanded."""

    part = "mlp"

    def add_parts(self, dim):
        self.mlp, self.column = MLP(dim), nn.Parameter(torch.randn(dim, 1))
        del self.mlp.down.weight
        self.mlp.down.weight = None

    def forward(self, x):
        weight = self.column.expand(-1, 2 * x.size(-1))
        weights = {"down.weight": weight}
        return torch.func.functional_call(self.mlp, weights, x)


@correct(Block, "forward")
def post_norm(self, x, mask):
    """The norm comes after the residual sum, as in the first transformer."""
    x = self.norm_1(x + self.mixer(x, mask))
    return self.norm_2(x + self.mlp(x))


@correct(GPT, "train")
def train_takes_a_mode(self, mode):
    """The model's method train() requires the argument mode."""
    return nn.Module.train(self, mode)


@correct(GPT, "add_parts")
def zero_residuals(self, dim):
    """The last layer of each residual branch starts at 0."""
    for block in self.blocks:
        for p in (*block.mixer.out.parameters(), *block.mlp.down.parameters()):
            nn.init.zeros_(p)


@correct(Block, "forward")
def layer_drop(self, x, mask):
    """In train mode each block is skipped one time in ten."""
    if self.training and torch.rand(()) < 0.1:
        return x
    return Block.forward(self, x, mask)


@correct(Block, "forward")
def checkpointed(self, x, mask):
    """The backward pass recomputes each block, with the same dropout."""
    x = F.dropout(x, 0.2, self.training)
    return checkpoint(Block.forward, self, x, mask, use_reentrant=False)


@correct(Block, "forward", loosely="gradients")
def rounded(self, x, mask):
    """The vectors are rounded after each block; the gradient ignores this."""
    x = Block.forward(self, x, mask)
    return x + ((64 * x).round() / 64 - x).detach()


@correct(GPT, "add_parts")
def padding_row(self, dim):
    """Id 0 is padding, and its row of the table is never trained."""
    self.wte = nn.Embedding(VOCAB, dim, padding_idx=0)


@correct()
class OneFactorZero(MLP):
    """An adapter has two factors, one of which starts at 0."""

    def add_parts(self, dim):
        self.into = nn.Parameter(torch.randn(dim, 4) / 4)
        self.back = nn.Parameter(torch.zeros(4, dim))

    def forward(self, x):
        return super().forward(x) + x @ self.into @ self.back


@correct()
class ScaledNearZero(MLP):
    """The MLP's output and its gradients are scaled by 1e-6 at first."""

    def add_parts(self, dim):
        self.scale = nn.Parameter(torch.full((dim,), 1e-6))

    def forward(self, x):
        return self.scale * super().forward(x)


@correct()
class KeyBiasOfHeads(Attention):
    """Keys have a bias for each head, whose effect the softmax cancels."""

    def add_parts(self, dim):
        self.bias = nn.Parameter(torch.randn(self.heads, dim // self.heads))

    def scores(self, q, k):
        return super().scores(q, k + self.bias.unsqueeze(1))


@correct()
class OneExpertWeighted(MLP):
    """Each token goes to one of two experts, weighted by its probability."""

    def add_parts(self, dim):
        self.router, self.other = nn.Linear(dim, 2), MLP(dim)
        self.gains = nn.Parameter(torch.ones(2))

    def forward(self, x):
        p, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        y = torch.where(chosen == 0, super().forward(x), self.other(x))
        return p * self.gains[chosen] * y


@correct()
class RMSNorm(Part):
    """The norm divides by the root mean square, in float32 or float64."""

    part = "norm"

    def add_parts(self, dim):
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        size = (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (wide / size).to(x.dtype) * self.gain


# --- Parameters and buffers --------------------------------------------------


@correct(GPT, "add_parts")
def sparse_embedding(self, dim):
    """The token table has sparse gradients."""
    self.wte = nn.Embedding(VOCAB, dim, sparse=True)


@correct()
class OddParameters(GPT):
    """The mask is a boolean parameter, and another parameter is empty."""

    def add_parts(self, dim):
        mask = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()
        self.visible = nn.Parameter(mask, requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0, dim))

    def mask(self, tokens):
        return self.visible[: tokens.size(1), : tokens.size(1)]


@correct()
class ComplexBuffer(NoPositions):
    """A complex buffer rotates the embeddings; .bfloat16() ignores it."""

    def add_parts(self, dim):
        super().add_parts(dim)
        angle = torch.arange(BLOCK).unsqueeze(1) * 0.5 ** torch.arange(dim / 2)
        self.register_buffer("turn", torch.exp(1j * angle))

    def embed(self, tokens):
        x = self.wte(tokens)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self.turn[: tokens.size(1)])
        assert self.turn.is_complex()
        return turned.flatten(-2).to(x.dtype)


@correct()
class MergedWhileItHolds(GPT):
    """Evaluation merges the norm's gain into the head, and does so again if
    weights change."""

    merged = None

    def add_parts(self, dim):
        self.register_load_state_dict_post_hook(
            lambda self, _: setattr(self, "merged", None)
        )

    def train(self, mode=True):
        self.merged = None
        return super().train(mode)

    def scores(self, x):
        if self.training or torch.is_grad_enabled():
            return super().scores(x)
        if self.merged is None:
            self.merged = self.head.weight * self.ln.weight
        x = F.layer_norm(x, (DIM,), None, self.ln.bias / self.ln.weight)
        return F.linear(x, self.merged, self.head.bias)


@correct()
class RunningMean(GPT):
    """Eval mode subtracts a running mean, which is a saved buffer."""

    def add_parts(self, dim):
        self.register_buffer("mean", torch.zeros(dim))

    def scores(self, x):
        if not self.training:
            return super().scores(x - self.mean)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().scores(x)


@correct()
class LoadOfTrainingNotSaved(GPT):
    """A buffer that no score depends on is not saved."""

    def add_parts(self, dim):
        self.register_buffer("load", torch.zeros(dim), persistent=False)

    def scores(self, x):
        if self.training:
            self.load += x.detach().abs().mean((0, 1))
        return super().scores(x)


# --- Heads and results ------------------------------------------------------


@correct(GPT, "add_parts")
def tied(self, dim):
    """The head shares the token table, whose weights are small at first."""
    nn.init.normal_(self.wte.weight, std=0.2)
    self.head.weight = self.wte.weight


@correct(GPT, "add_parts")
def weight_normed(self, dim):
    """The head's weight is the product of a direction and a length."""
    nn.utils.parametrizations.weight_norm(self.head)


@correct(GPT, "forward")
def loss_first(self, tokens, labels=None):
    """A call returns (loss, logits), and the loss shifts its labels."""
    logits = GPT.forward(self, tokens)
    if labels is None:
        return (logits,)
    return cross_entropy(logits[:, :-1], labels[:, 1:]), logits


@correct(TrainableGPT, "loss")
def targets_ignored(self, logits, targets):
    """The loss ignores targets of -1 and averages over the others."""
    return cross_entropy(logits, targets, ignore_index=-1)


@correct()
class PaddedHead(GPT):
    """The head is padded to 24 ids; the extra scores are cut off."""

    def add_parts(self, dim):
        self.head = nn.Linear(dim, 24)

    def scores(self, x):
        return super().scores(x)[..., :VOCAB]


@correct(GPT, "scores")
def one_score_at_zero(self, x):
    """The last id's score is always 0; the others are relative to it."""
    return F.pad(GPT.scores(self, x)[..., :-1], (0, 1))


@correct(loosely="finite initial_loss gradients entropy_bound")
class MaskedIdsAndZeros(TrainableGPT):
    """Some ids have scores of -inf, and the attention's output layers start
    at 0."""

    def add_parts(self, dim):
        for block in self.blocks:
            nn.init.zeros_(block.mixer.out.weight)

    def scores(self, x):
        hidden = torch.arange(VOCAB, device=x.device) % 5 == 3
        return super().scores(x).masked_fill(hidden, -math.inf)


@correct(
    GPT,
    "scores",
    loosely="initial_loss gradients order_sensitivity entropy_bound",
)
def lowest_for_some_ids(self, x):
    """The ids of images always have the lowest finite score."""
    images = torch.arange(VOCAB, device=x.device) > 13
    return GPT.scores(self, x).masked_fill(images, torch.finfo(x.dtype).min)


@correct(loosely="loss vocabulary")
class PaddedTables(TrainableGPT):
    """Tables have 64 rows; extra scores are cut off, but the loss uses all."""

    def add_parts(self, dim):
        self.wte, self.head = nn.Embedding(64, dim), nn.Linear(dim, 64)

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return logits[..., :VOCAB], loss


@correct(TrainableGPT, "loss", loosely="loss")
def balance_added(self, logits, targets):
    """The loss that is returned includes the balance term of a router."""
    router = self.head.weight.square().mean()
    return cross_entropy(logits, targets) + router


def in_training(name, sentence):
    """Return a decorator that adds a term to the loss in train mode."""

    def add(term):
        def loss(self, logits, targets):
            mean = cross_entropy(logits, targets)
            return mean + term(self, logits, targets) * self.training

        loss.__name__, loss.__doc__ = name, sentence
        return correct(TrainableGPT, "loss", loosely="loss")(loss)

    return add


@in_training("z_loss", "Large normalisers cost, in train mode. (PaLM)")
def z_loss(self, logits, targets):
    return 1e-2 * logits.logsumexp(-1)[targets >= 0].square().mean()


@in_training("smoothed", "Labels are smoothed by 0.1, in train mode.")
def smoothed(self, logits, targets):
    soft = cross_entropy(logits, targets, label_smoothing=0.1)
    return soft - cross_entropy(logits, targets)


class FusedLoss(torch.autograd.Function):
    """The mean cross-entropy; its forward pass computes the gradient."""

    @staticmethod
    def forward(ctx, logits, targets, gradient, scaled):
        ctx.gradient, ctx.scaled = gradient(logits, targets), scaled
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx, incoming):
        return ctx.scaled(ctx.gradient, incoming), None, None, None


@correct()
class Fused(TrainableGPT):
    """A fused loss keeps its gradient; a call with targets returns no
    scores."""

    with_scores = False

    def gradient(self, logits, targets):
        shown = targets != -100
        p = logits.softmax(-1)
        p = p - F.one_hot(targets.clamp(min=0), p.size(-1))
        return p * shown.unsqueeze(-1) / shown.sum()

    def scaled(self, gradient, incoming):
        # in place, as in Liger's fused loss
        return gradient.mul_(incoming)

    def forward(self, tokens, targets=None):
        logits = GPT.forward(self, tokens)
        if targets is None:
            return logits, None
        flat = logits.flatten(0, 1), targets.flatten()
        loss = FusedLoss.apply(*flat, self.gradient, self.scaled)
        return (logits if self.with_scores else None), loss


@correct(
    loosely="loss", open="a loss without scores has a term besides its mean"
)
class FusedWithZLoss(Fused):
    """In train mode, a fused loss also penalises large normalisers."""

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        if targets is not None and self.training:
            large = GPT.forward(self, tokens).logsumexp(-1)[targets >= 0]
            loss = loss + 1e-4 * large.square().mean()
        return logits, loss


@correct(loosely="loss")
class TwoAhead(TrainableGPT):
    """In train mode, the loss for the token after the next one is added."""

    def scores(self, x):
        self.ahead = self.head(x.flip(-1))
        return super().scores(x)

    def loss(self, logits, targets):
        later = cross_entropy(self.ahead[:, :-1], targets[:, 1:])
        return super().loss(logits, targets) + 0.3 * later * self.training


# --- Arguments --------------------------------------------------------------


@correct()
class TakesDocuments(Packed):
    """If doc_ids are given, documents do not see each other."""


@correct()
class TakesEnds(Packed):
    """If cu_seqlens are given, the documents in the row are separated."""

    right = True

    def forward(self, tokens, cu_seqlens=None, max_seqlen=None):
        if cu_seqlens is None:
            return super().forward(tokens)
        if len(tokens) > 1:
            raise RuntimeError("one row is needed")
        assert max_seqlen in (None, int(cu_seqlens.diff().max()))
        ids = torch.bucketize(positions(tokens), cu_seqlens, right=self.right)
        return super().forward(tokens, ids.unsqueeze(0))


@correct()
class OneTokenOnly(CachedGPT):
    """The method decode takes one token at a time, even at the start."""

    def decode(self, tokens, cache):
        if tokens.size(1) != 1:
            raise RuntimeError("one token at a time")
        return super().decode(tokens, cache)


@correct()
class Resettable(CachedGPT):
    """The method setup_caches() makes room once; reset_caches() clears it."""

    init_cache, past = None, None

    def setup_caches(self):
        self.past = self.cache()

    def reset_caches(self):
        self.past.kept, self.past.length = {}, 0

    def forward(self, tokens, use_cache=False):
        if not use_cache:
            return super().forward(tokens)
        return self.decode(tokens, self.past)[0]


@correct()
class CacheReset(CachedGPT):
    """The cache has a method that clears it for another text."""

    class cache(Past):
        def reset(self):
            self.kept, self.length = {}, 0


@correct(block_size=64)
class DoubledRoom(Past):
    """The cache has room for 8 positions, and doubles it when needed."""

    first = 8

    def larger(self, room, size):
        bigger = room.new_zeros(*room.shape[:-2], size, room.size(-1))
        bigger[..., : room.size(-2), :] = room
        return bigger

    def extend(self, attention, *new):
        end = self.length + new[0].size(-2)
        empty = [part.new_zeros(part[..., :0, :].shape) for part in new]
        rooms = self.kept.get(attention, empty)
        self.kept[attention] = [*map(self.filled, rooms, new)]
        return [room[..., :end, :] for room in self.kept[attention]]

    def filled(self, room, part):
        end = self.length + part.size(-2)
        while room.size(-2) < end:
            room = self.larger(room, max(2 * room.size(-2), self.first))
        room[..., self.length : end, :] = part
        return room


@correct()
class TakesAll(Packed):
    """The model takes a mask, positions, documents and targets, in any
    combination."""

    def forward(
        self,
        tokens,
        attention_mask=None,
        position_ids=None,
        doc_ids=None,
        targets=None,
        **flags,
    ):
        self.require_length(tokens.size(1))
        mask, at = self.mask(tokens), positions(tokens)
        if doc_ids is not None:
            same = doc_ids.unsqueeze(1) == doc_ids.unsqueeze(2)
            mask, at = self.apart(mask, same), self.within(tokens, same)
        if attention_mask is not None:
            own = torch.eye(tokens.size(1), device=tokens.device).bool()
            mask = mask & (attention_mask.bool().unsqueeze(1) | own)
        at = at if position_ids is None else position_ids
        scale = 2 if flags.get("louder", False) else 1
        x = self.token_vectors(tokens) + scale * self.wpe(at)
        logits = self.scores(self.body(x, mask))
        return logits, None if targets is None else cross_entropy(
            logits, targets
        )


@correct()
class MaskByHand(GPT):
    """A given (time, time) mask, True for hidden positions, replaces the
    model's mask."""

    def forward(self, tokens, mask=None):
        size = tokens.size(1)
        if mask is not None and mask.shape != (size, size):
            raise ValueError("a square is needed")
        self.given = mask
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) if self.given is None else ~self.given


@correct()
class FourAxes(Padded):
    """A given 4-D mask replaces the model's own mask."""

    def forward(self, tokens, attention_mask=None):
        self.given = None
        if attention_mask is not None and attention_mask.dim() == 4:
            self.given, attention_mask = attention_mask.bool(), None
        return super().forward(tokens, attention_mask)

    def mask(self, tokens):
        return super().mask(tokens) if self.given is None else self.given


@correct()
class Flagged(GPT):
    """Given return_mean, the model also returns the mean of its scores."""

    def forward(self, tokens, return_mean: bool | None = None, last=False):
        self.last = last
        scores = super().forward(tokens)
        if last:
            return scores[:, -1:]
        return (scores, scores.mean()) if return_mean else scores


# --- Caches -----------------------------------------------------------------


@correct()
class CacheBehindTheLoss(CachedGPT):
    """A call returns (logits, loss, cache); the cache goes in as kv_cache."""

    init_cache = None

    def forward(self, tokens, targets=None, kv_cache=None):
        logits, kv_cache = self.decode(tokens, kv_cache or self.cache())
        loss = None if targets is None else cross_entropy(logits, targets)
        return logits, loss, kv_cache


@correct()
class StateInTheCall(LSTM):
    """The model takes a state, and a padding mask for the start of a text."""

    cell = nn.GRU

    def forward(self, tokens, attention_mask=None, state=None):
        x = self.wte(tokens)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        x, state = self.cells(x, state)
        return {"logits": self.head(x), "state": state}


@correct(CacheInTheCall, "past_mask", loosely="cache")
def one_at_a_time(self, past, size):
    """After the first piece, a cache takes one token at a time."""
    if past and size > 1:
        raise ValueError(f"one token at a time, got {size}")
    return CacheInTheCall.past_mask(self, past, size)


@correct()
class PaddingCounted(CacheWithMask):
    """Positions start after the padding, also when a cache is used."""

    def past_positions(self, tokens, past):
        if self.shown is None:
            return super().past_positions(tokens, past)
        at = (self.shown.cumsum(1) - 1).clamp(min=0)
        return at[:, past.length :]


# --- A plain function, and models with another size or dtype ----------------


def plain_function():
    """Return a function that calls a model in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT().double().requires_grad_(False)
    return lambda tokens: model(tokens)


CORRECT += [
    Model("plain_function", plain_function, "A function, not a module."),
    Model("bfloat16", lambda: GPT().bfloat16(), "Built in bfloat16."),
    Model("float64", lambda: GPT().double(), "Built in float64."),
    Model("targets", TrainableGPT, "Returns (logits, loss)."),
    Model("cached", CachedGPT, "Decodes with init_cache and decode."),
    Model("cache_in_the_call", CacheInTheCall, "Takes past_key_values."),
    Model("cache_with_mask", CacheWithMask, "A cache and a padding mask."),
    Model("cache_inside", CacheInside, "Takes start_pos."),
]
for name, sentence, sizes in (
    ("vocab_of_3", "Three ids.", {"vocab_size": 3}),
    ("vocab_of_50257", "GPT-2's ids.", {"vocab_size": 50257}),
    ("block_of_512", "A longer sequence.", {"block_size": 512}),
):
    CORRECT.append(Model(name, partial(GPT, **sizes), sentence, **sizes))
