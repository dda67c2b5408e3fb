"""A third style for the tests: a decoder by another author.

It differs from both styles. One einsum computes all heads, linear maps have
the orientation of GPT-2's files, and no table declares names.
"""

import torch
import torch.nn.functional as F
from torch import nn

from gpt_duet.checkpoint.gpt2_layout import read_gpt2

CAUSAL = True  # whether attention is causal; a test may set False


class Affine(nn.Module):
    """A linear map whose weight has shape (inputs, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Heads(nn.Module):
    """Attention whose heads all come from one einsum."""

    def __init__(self, config):
        super().__init__()
        C, self.h = config.n_embd, config.n_head
        self.qkv, self.join = Affine(C, 3 * C), Affine(C, C)

    def forward(self, x):
        T, C = x.shape[1:]
        weight = self.qkv.weight.view(C, 3, self.h, C // self.h)
        shift = self.qkv.bias.view(3, 1, self.h, 1, C // self.h)
        q, k, v = torch.einsum("btc,cnhd->nbhtd", x, weight) + shift
        scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        if CAUSAL:
            seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        p = torch.softmax(scores, -1)
        return self.join((p @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of attention and an MLP, each after a norm."""

    def __init__(self, config):
        super().__init__()
        C, inner = config.n_embd, config.inner_size
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(2))
        self.heads = Heads(config)
        self.net = nn.Sequential(
            Affine(C, inner), nn.GELU(approximate="tanh"), Affine(inner, C)
        )

    def forward(self, x):
        x = x + self.heads(self.norms[0](x))
        return x + self.net(self.norms[1](x))


class Mine(nn.Module):
    """The whole decoder, which returns log-probabilities."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size
        C, V = config.n_embd, config.vocab_size
        self.tables = nn.ModuleList(
            [nn.Embedding(V, C), nn.Embedding(config.block_size, C)]
        )
        self.start = nn.Identity()
        self.layers = nn.ModuleList(
            Layer(config) for _ in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(C)
        self.out = nn.Linear(C, V)

    def log_probs(self, tokens):
        where = torch.arange(tokens.size(1), device=tokens.device)
        x = self.start(self.tables[0](tokens) + self.tables[1](where))
        for layer in self.layers:
            x = layer(x)
        return F.log_softmax(self.out(self.norm(x)), -1)


def build_model(config):
    return Mine(config)


def gpt2_name(name):
    """Return GPT-2's name for a parameter of this style."""
    for mine, his in (
        ("tables.0", "wte"),
        ("tables.1", "wpe"),
        ("layers.", "h."),
        ("norms.0", "ln_1"),
        ("norms.1", "ln_2"),
        ("heads.qkv", "attn.c_attn"),
        ("heads.join", "attn.c_proj"),
        ("net.0", "mlp.c_fc"),
        ("net.2", "mlp.c_proj"),
        ("norm.", "ln_f."),
        ("out.", "lm_head."),
    ):
        name = name.replace(mine, his)
    return name


def from_gpt2(state, config):
    state = read_gpt2(state, config)
    model = Mine(config).to(state["wte.weight"])
    nn.init.zeros_(model.out.bias)
    for name, parameter in model.named_parameters():
        if gpt2_name(name) in state:
            parameter.data.copy_(state[gpt2_name(name)])
    return model


def to_gpt2(model):
    state = model.state_dict()
    return {gpt2_name(name): tensor.clone() for name, tensor in state.items()}


COMPONENTS = {
    "embedding": (Mine,),
    "attention": (Heads,),
    "feed_forward": (Layer,),
    "block": (Layer,),
    "model": (Mine,),
    "head": (Mine.log_probs,),
    "weights": (from_gpt2,),
}
STAGES = {
    "embedding": "start",
    "block.{i}.attention": "layers.{i}.heads",
    "block.{i}.feed_forward": "layers.{i}.net",
    "block.{i}": "layers.{i}",
    "final_norm": "norm",
}
