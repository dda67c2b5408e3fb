"""A third GPT for the tests: a dictionary of weights, and a function per part.

Only Conv1D is a module. Its weights have the orientation of GPT-2's files. The
norm, the GELU and the softmax are written out. One product gives queries, keys
and values; it is cut head by head.
"""

import math

import torch
from torch import nn


def embed(w, ids):
    places = torch.arange(ids.size(1))
    return w["wte.weight"][ids] + w["wpe.weight"][places]


def norm(x, gain, shift, eps):
    centre = x - x.mean(-1, keepdim=True)
    spread = (centre**2).mean(-1, keepdim=True)
    return centre / torch.sqrt(spread + eps) * gain + shift


def gelu(x):
    inner = x + 0.044715 * x**3
    curve = torch.tanh(math.sqrt(2 / math.pi) * inner)
    return 0.5 * x * (1 + curve)


def head(q, k, v):
    scores = q @ k.mT
    scores = scores / math.sqrt(q.size(-1))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ v


def attention(w, x, heads):
    qkv = x @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]
    q, k, v = qkv.chunk(3, -1)
    cut = [part.chunk(heads, -1) for part in (q, k, v)]
    heads = [head(*parts) for parts in zip(*cut, strict=True)]
    joined = torch.cat(heads, -1)
    return joined @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]


def feed_forward(w, x):
    wide = x @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"]
    bent = gelu(wide)
    return bent @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]


def block(w, x, config):
    eps = config.norm_eps or 1e-5
    first = norm(x, w["ln_1.weight"], w["ln_1.bias"], eps)
    x = x + attention(w, first, config.n_head)
    second = norm(x, w["ln_2.weight"], w["ln_2.bias"], eps)
    return x + feed_forward(w, second)


class Ported(nn.Module):
    """A module that holds all weights of a checkpoint in GPT-2's layout."""

    def __init__(self, state, config):
        super().__init__()
        self.config = config
        self.names = list(state)
        self.tensors = nn.ParameterList(state.values())

    def forward(self, ids):
        w = dict(zip(self.names, self.tensors, strict=True))
        x = embed(w, ids)
        for i in range(self.config.n_layer):
            start = f"h.{i}."
            own = {k[len(start) :]: v for k, v in w.items() if start in k}
            x = block(own, x, self.config)
        x = norm(
            x, w["ln_f.weight"], w["ln_f.bias"], self.config.norm_eps or 1e-5
        )
        return x @ w["lm_head.weight"].T
