"""Correct models of many kinds, which no check may accuse."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    Mixer,
    TrainableGPT,
    causal,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Correct:
    """A sound model, and what is unusual about it."""

    name: str
    build: Callable[[], Callable]
    vocab_size: int = VOCAB
    block_size: int = BLOCK
    note: str = ""


class NoPositions(GPT):
    """Positions come in elsewhere: in the attention, or by recurrence."""

    def __init__(self, mixer=Attention):
        super().__init__(mixer=mixer)
        del self.wpe

    def embed(self, tokens):
        return self.wte(tokens)


class Endless(NoPositions):
    """Declares no longest sequence."""

    def __init__(self, mixer=Attention):
        super().__init__(mixer)
        del self.block_size

    def require_length(self, size):
        pass


# --- Positions --------------------------------------------------------------


class Rotary(Attention):
    """Queries and keys are turned by their position."""

    def turn(self, x):
        at = torch.arange(x.size(-2), device=x.device).unsqueeze(1)
        rate = 100 ** -torch.linspace(0, 1, x.size(-1) // 2, device=x.device)
        cos, sin = (at * rate).cos().to(x), (at * rate).sin().to(x)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def attend(self, q, k, v, mask):
        return super().attend(self.turn(q), self.turn(k), v, mask)


class ALiBi(Attention):
    """The further back a key, the lower its score; each head at its own
    rate."""

    def hide(self, scores, mask):
        at = torch.arange(scores.size(-1), device=scores.device)
        slope = 0.5 ** torch.arange(1, 3, device=scores.device).view(2, 1, 1)
        bias = (slope * (at - at.unsqueeze(1))).to(scores.dtype)
        return super().hide(scores + bias, mask)


class Sinusoidal(GPT):
    """Positions from a buffer of sines and cosines."""

    def __init__(self):
        super().__init__()
        del self.wpe
        at = torch.arange(BLOCK).unsqueeze(1) / 100 ** torch.linspace(
            0, 1, DIM // 2
        )
        self.register_buffer("sines", torch.cat([at.sin(), at.cos()], 1))

    def position_vectors(self, tokens):
        return self.sines[: tokens.size(1)]


# --- Attention --------------------------------------------------------------


class GroupedQuery(Attention):
    """Four heads share two of keys and values, in the fused kernel."""

    def __init__(self, dim):
        super().__init__(dim)
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


class SlidingWindow(GPT):
    """Sees 8 tokens in its one layer, and says so."""

    layers = 1
    window = 8

    def mask(self, tokens):
        return super().mask(tokens).triu(1 - self.window)


class WindowInConfig(GPT):
    """Two layers of 6 tokens, declared in a config as the field does."""

    def __init__(self):
        super().__init__()
        self.config = WindowConfig()

    def mask(self, tokens):
        return super().mask(tokens).triu(1 - self.config.sliding_window)


@dataclass
class WindowConfig:
    sliding_window: int = 6
    vocab_size: int = VOCAB
    block_size: int = BLOCK


class FiniteMask(Attention):
    """The mask adds the lowest finite number, as several libraries do."""

    def hide(self, scores, mask):
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


class LinearAttention(Attention):
    """No softmax: a running sum of keys and values, and its normaliser."""

    def attend(self, q, k, v, mask):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)
        top = (q.unsqueeze(-2) @ state).squeeze(-2)
        return top / (q * k.cumsum(-2)).sum(-1, keepdim=True)


class Retention(Attention):
    """Scores decay with the distance; a mask of powers, no softmax."""

    def weights(self, scores, mask):
        at = torch.arange(scores.size(-1), device=scores.device)
        far = (at.unsqueeze(1) - at).clamp(min=0)
        decay = (0.9**far * mask).to(scores.dtype)
        return scores * decay


# --- Without attention ------------------------------------------------------


class Convolution(Mixer):
    """Two convolutions, padded on the left alone; together they see far."""

    def __init__(self, dim):
        super().__init__(dim)
        self.conv = nn.Conv1d(dim, dim, 17)

    def forward(self, x, mask):
        return self.conv(F.pad(x.mT, (16, 0))).mT


class LongConvolution(Mixer):
    """A convolution as long as the text, through the FFT, padded: causal
    to rounding, not to the last bit."""

    def __init__(self, dim):
        super().__init__(dim)
        self.kernel = nn.Parameter(torch.randn(BLOCK, dim) / 4)

    def forward(self, x, mask):
        size, dtype = x.size(1), x.dtype
        if dtype in (torch.bfloat16, torch.float16):
            x = x.float()
        kernel = torch.fft.rfft(self.kernel[:size].to(x), n=2 * size, dim=0)
        y = torch.fft.rfft(x, n=2 * size, dim=1) * kernel
        return torch.fft.irfft(y, n=2 * size, dim=1)[:, :size].to(dtype)


class Recurrent(nn.Module):
    """An LSTM between an embedding and a head, nothing else."""

    def __init__(self):
        super().__init__()
        self.vocab_size = VOCAB
        self.wte = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids):
        return self.head(self.lstm(self.wte(input_ids))[0])


class StateSpace(Mixer):
    """A diagonal state-space scan whose decay each token chooses."""

    def __init__(self, dim):
        super().__init__(dim)
        self.into = nn.Linear(dim, dim)
        self.decay = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        into, decay = self.into(x), (self.decay(x) + 2).sigmoid()
        state, states = torch.zeros_like(into[:, 0]), []
        for t in range(x.size(1)):
            state = decay[:, t] * state + (1 - decay[:, t]) * into[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1))


# --- Blocks -----------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to its best two of three experts, gathered by
    expert: sums regroup as other tokens come and go."""

    def __init__(self, dim):
        super().__init__()
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


class PostNorm(Block):
    """The norm comes after the sum, as in the paper."""

    def forward(self, x, mask):
        x = self.norm_1(x + self.mixer(x, mask))
        return self.norm_2(x + self.mlp(x))


class ZeroResiduals(Block):
    """Both residual lines start at exactly 0."""

    def __init__(self, mixer, mlp, norm, dim):
        super().__init__(mixer, mlp, norm, dim)
        for linear in (self.mixer.out, self.mlp.down):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)


class HeavyDropout(Block):
    """Dropout of a half on both residual lines."""

    def __init__(self, mixer, mlp, norm, dim):
        super().__init__(mixer, mlp, norm, dim)
        self.drop = nn.Dropout(0.5)


class LayerDrop(Block):
    """In train mode the block is left out one time in ten."""

    def forward(self, x, mask):
        if self.training and torch.rand(()) < 0.1:
            return x
        return super().forward(x, mask)


class Checkpointed(Block):
    """The block runs again in the backward pass."""

    def forward(self, x, mask):
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class RMSNorm(nn.Module):
    """Divides by the root mean square, computed in float32 at least."""

    part = "norm"

    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        size = (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (wide / size).to(x.dtype) * self.gain


# --- Heads and answers ------------------------------------------------------


class Tied(GPT):
    """The head is the token table, drawn small enough for both."""

    def __init__(self):
        super().__init__()
        nn.init.normal_(self.wte.weight, std=0.2)
        self.head.weight = self.wte.weight


class WeightNormed(GPT):
    """The head's weight is a direction times a length."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.head)


class LossFirst(GPT):
    """Returns (loss, logits); the loss shifts its labels inside."""

    def forward(self, tokens, labels=None):
        logits = super().forward(tokens)
        if labels is None:
            return (logits,)
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        return loss, logits


class Dictionary(GPT):
    """Returns a dict, and calls its ids input_ids."""

    def forward(self, input_ids):
        return {"state": None, "logits": super().forward(input_ids)}


class VocabularySecond(GPT):
    """Returns (batch, vocab, time), as cross-entropy wants it."""

    def forward(self, tokens):
        return super().forward(tokens).mT


class LogProbabilities(GPT):
    """Has the method log_probs beside its logits."""

    def log_probs(self, tokens):
        return self(tokens).log_softmax(-1)


class Careful(TrainableGPT):
    """Ignores targets of -1, and has a mean of the others."""

    def loss(self, logits, targets):
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1
        )


class PaddedHead(GPT):
    """The head is padded to a round number and cut back."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(DIM, 24)

    def scores(self, x):
        return super().scores(x)[..., :VOCAB]


class SoftCap(GPT):
    """Soft-capped scores."""

    def scores(self, x):
        return 5 * (super().scores(x) / 5).tanh()


# --- A plain function -------------------------------------------------------


def plain_function():
    """A function of tensors it closes over, in float64."""
    draw = torch.Generator().manual_seed(0)
    table, keys, out = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) / 2
        for shape in ((VOCAB, DIM), (DIM, DIM), (DIM, VOCAB))
    )
    place = torch.randn(BLOCK, DIM, generator=draw, dtype=torch.float64)

    def scores(tokens):
        if tokens.size(1) > BLOCK:
            raise ValueError(f"{tokens.size(1)} tokens, at most {BLOCK}")
        if tokens.min() < 0:
            raise ValueError("ids start at 0")
        x = table[tokens] + place[: tokens.size(1)] / 4
        a = (x @ keys @ x.mT / math.sqrt(DIM)).masked_fill(
            ~causal(tokens, tokens.size(1)), -math.inf
        )
        return (x + a.softmax(-1) @ x) @ out / 2

    return scores


def of(**parts):
    return partial(GPT, **parts)


def cast(build, dtype):
    return lambda: build().to(dtype)


CORRECT = [
    Correct("base", GPT),
    Correct("rotary", partial(NoPositions, mixer=Rotary)),
    Correct("alibi", partial(NoPositions, mixer=ALiBi)),
    Correct("sinusoidal", Sinusoidal),
    Correct("grouped_query", of(mixer=GroupedQuery), note="fused kernel"),
    Correct("sliding_window", SlidingWindow, note="declares window"),
    Correct("window_in_config", WindowInConfig, note="config.sliding_window"),
    Correct("finite_mask", of(mixer=FiniteMask), note="finfo.min"),
    Correct("linear_attention", of(mixer=LinearAttention)),
    Correct("retention", of(mixer=Retention), note="decay 0.9"),
    Correct("convolution", of(mixer=Convolution)),
    Correct("long_convolution", of(mixer=LongConvolution), note="FFT, padded"),
    Correct("lstm", Recurrent, note="no block limit"),
    Correct("state_space", partial(NoPositions, mixer=StateSpace)),
    Correct("experts", of(mlp=Experts), note="routed token by token"),
    Correct("post_norm", of(block=PostNorm)),
    Correct("rms_norm", of(norm=RMSNorm), note="upcasts inside"),
    Correct("tied", Tied),
    Correct("weight_normed", WeightNormed),
    Correct("zero_residuals", of(block=ZeroResiduals)),
    Correct("dropout_half", of(block=HeavyDropout)),
    Correct("layer_drop", of(block=LayerDrop)),
    Correct("checkpointed", of(block=Checkpointed)),
    Correct("bfloat16", cast(GPT, torch.bfloat16), note="weights as built"),
    Correct("float64", cast(GPT, torch.float64), note="weights as built"),
    Correct("vocab_of_3", of(vocab=3), vocab_size=3),
    Correct("vocab_of_50257", of(vocab=50257), vocab_size=50257),
    Correct("block_of_512", of(block_size=512), block_size=512),
    Correct("endless", partial(Endless, mixer=Rotary), note="no block limit"),
    Correct("targets", TrainableGPT, note="(logits, loss)"),
    Correct("targets_ignored", Careful, note="ignore_index=-1"),
    Correct("loss_first", LossFirst, note="(loss, logits), shifts inside"),
    Correct("dictionary", Dictionary, note="a dict, input_ids"),
    Correct("vocabulary_second", VocabularySecond, note="(B, V, T)"),
    Correct("log_probs", LogProbabilities, note="has log_probs"),
    Correct("padded_head", PaddedHead, note="cut back to the vocabulary"),
    Correct("soft_cap", SoftCap, note="scores through tanh"),
    Correct("cached", CachedGPT, note="init_cache and decode"),
    Correct("one_layer", of(layers=1)),
    Correct("plain_function", plain_function, note="not a module"),
]
