"""A port of `hidden_pairs.Original`, written for inference."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def rotate(x):
    speeds = 100.0 ** -(torch.arange(0, 4).double() / 4)
    angles = torch.arange(x.size(2))[:, None] * speeds
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Written(nn.Module):
    """a port without dropout"""

    vocab_size, block_size = 97, 130

    def __init__(self, state):
        super().__init__()
        names = {name: name.replace(".", "_") for name in state}
        self.w = nn.ParameterDict({names[n]: t for n, t in state.items()})

    def norm(self, x, name):
        centred = x - x.mean(-1, keepdim=True)
        root = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (
            centred / root * self.w[f"{name}_weight"] + self.w[f"{name}_bias"]
        )

    def linear(self, x, name):
        return x @ self.w[f"{name}_weight"].T + self.w[f"{name}_bias"]

    def attend(self, x, ids):
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.linear(x, "qkv").chunk(3, -1)
        )
        q, k = rotate(q), rotate(k)
        scores = q @ k.mT / math.sqrt(8)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return self.linear((weights @ v).transpose(1, 2).flatten(2), "proj")

    def forward(self, ids):
        x = self.w["table_weight"][ids]
        x = x + self.attend(self.norm(x, "ln_1"), ids)
        wide = F.gelu(self.linear(self.norm(x, "ln_2"), "up"))
        x = x + self.linear(wide, "down")
        x = x + self.w["gate"] * x.roll(1, -1)
        return self.norm(x, "ln_f") @ self.w["head_weight"].T
