"""Ports of Llama by Meta and gpt-fast, of GPT-2 by Raschka, and of GPT-NeoX.

`Meta` permutes the rows of the query and key weights, and rotates neighbouring
pairs as complex numbers. `Fused` has one projection for queries, keys and
values, rotates halves, and calls the fused kernel. `Written` has GPT-2's parts
written out, with a constant in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Port(nn.Module):
    """Base of the ports, with the sizes and weights of another model."""

    stem = "model/layers"

    def __init__(self, state, config):
        super().__init__()
        self.w = nn.ParameterDict(
            {k.replace(".", "/"): v.clone() for k, v in state.items()}
        )
        self.vocab_size, self.layers = config.vocab_size, config.n_layer
        self.block_size = 16

    def of_layer(self, i):
        start = f"{self.stem}/{i}/"
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.w.items()
            if name.startswith(start)
        }


class Meta(Port):
    heads, groups = 4, 2

    def __init__(self, state, config):
        super().__init__(state, config)
        for name, tensor in self.w.items():
            if "q_proj" in name or "k_proj" in name:
                halves = tensor.data.view(-1, 2, 4, tensor.size(1))
                tensor.data = halves.transpose(1, 2).reshape(tensor.shape)
        speeds = 10_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
        angles = torch.outer(torch.arange(16).double(), speeds)
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def norm(self, x, weight):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * root * weight

    def rotate(self, x):
        single = x.float()
        pairs = torch.view_as_complex(single.unflatten(-1, (-1, 2)))
        turns = self.turns[: x.size(1)].to(pairs.dtype)
        turned = pairs * turns[:, None]
        return torch.view_as_real(turned).flatten(-2).type_as(x)

    def attention(self, w, x):
        batch, time, width = x.shape
        q = x @ w["self_attn/q_proj/weight"].T
        k = x @ w["self_attn/k_proj/weight"].T
        v = x @ w["self_attn/v_proj/weight"].T
        q = q.view(batch, time, self.heads, 8)
        k = k.view(batch, time, self.groups, 8)
        v = v.view(batch, time, self.groups, 8)
        q = self.rotate(q)
        k = self.rotate(k)
        times = self.heads // self.groups
        k = k.repeat_interleave(times, 2)
        v = v.repeat_interleave(times, 2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = q @ k.transpose(2, 3)
        scores = scores / math.sqrt(8)
        mask = torch.full((time, time), float("-inf"))
        mask = torch.triu(mask, diagonal=1)
        scores = scores + mask
        weights = F.softmax(scores, dim=-1)
        y = weights @ v
        y = y.transpose(1, 2).reshape(batch, time, width)
        return y @ w["self_attn/o_proj/weight"].T

    def feed_forward(self, w, x):
        gate = x @ w["mlp/gate_proj/weight"].T
        up = x @ w["mlp/up_proj/weight"].T
        hidden = F.silu(gate) * up
        return hidden @ w["mlp/down_proj/weight"].T

    def forward(self, ids):
        x = F.embedding(ids, self.w["model/embed_tokens/weight"])
        for i in range(self.layers):
            w = self.of_layer(i)
            n = self.norm(x, w["input_layernorm/weight"])
            h = x + self.attention(w, n)
            n = self.norm(h, w["post_attention_layernorm/weight"])
            x = h + self.feed_forward(w, n)
        x = self.norm(x, self.w["model/norm/weight"])
        return x @ self.w["lm_head/weight"].T


class Fused(Port):
    heads, groups = 4, 2

    def __init__(self, state, config):
        super().__init__(state, config)
        for i in range(self.layers):
            w = self.of_layer(i)
            start = f"model/layers/{i}/"
            for joined, names in (
                ("wqkv", [f"self_attn/{n}_proj/weight" for n in "qkv"]),
                ("gate_up", [f"mlp/{n}_proj/weight" for n in ("gate", "up")]),
            ):
                parts = [w[name].data for name in names]
                self.w[start + joined] = nn.Parameter(torch.cat(parts))
                for name in names:
                    del self.w[start + name]

    def tables(self, time, dtype):
        speeds = 10_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
        angles = torch.arange(time).double()[:, None] * speeds
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * cos + turned * sin

    def attention(self, w, x, cos, sin):
        batch, time, width = x.shape
        qkv = F.linear(x, w["wqkv"])
        q, k, v = qkv.split([width, width // 2, width // 2], -1)
        q = q.view(batch, time, self.heads, 8).transpose(1, 2)
        k = k.view(batch, time, self.groups, 8).transpose(1, 2)
        v = v.view(batch, time, self.groups, 8).transpose(1, 2)
        q = self.rotate(q, cos, sin)
        k = self.rotate(k, cos, sin)
        k = k.repeat_interleave(2, 1)
        v = v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, time, width)
        return F.linear(y, w["self_attn/o_proj/weight"])

    def feed_forward(self, w, x):
        gate, up = F.linear(x, w["gate_up"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, w["mlp/down_proj/weight"])

    def norm(self, x, weight):
        return F.rms_norm(x, (x.size(-1),), weight, 1e-5)

    def forward(self, ids):
        x = F.embedding(ids, self.w["model/embed_tokens/weight"])
        cos, sin = self.tables(ids.size(1), x.dtype)
        for i in range(self.layers):
            w = self.of_layer(i)
            n = self.norm(x, w["input_layernorm/weight"])
            x = x + self.attention(w, n, cos, sin)
            n = self.norm(x, w["post_attention_layernorm/weight"])
            x = x + self.feed_forward(w, n)
        x = self.norm(x, self.w["model/norm/weight"])
        return F.linear(x, self.w["lm_head/weight"])


class Written(Port):
    heads, stem = 4, "transformer/h"

    def layer_norm(self, x, gain, shift):
        mean = x.mean(-1, keepdim=True)
        spread = x.var(-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(spread + 1e-5)
        return gain * normed + shift

    def gelu(self, x):
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * x**3)))

    def attention(self, w, x):
        batch, time, width = x.shape
        weight = w["attn/c_attn/weight"].chunk(3, 1)
        bias = w["attn/c_attn/bias"].chunk(3)
        queries = x @ weight[0] + bias[0]
        keys = x @ weight[1] + bias[1]
        values = x @ weight[2] + bias[2]
        keys = keys.view(batch, time, self.heads, 8).transpose(1, 2)
        values = values.view(batch, time, self.heads, 8).transpose(1, 2)
        queries = queries.view(batch, time, self.heads, 8).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        mask = torch.triu(torch.ones(time, time), diagonal=1).bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        y = (weights @ values).transpose(1, 2)
        y = y.reshape(batch, time, width)
        return y @ w["attn/c_proj/weight"] + w["attn/c_proj/bias"]

    def feed_forward(self, w, x):
        wide = x @ w["mlp/c_fc/weight"] + w["mlp/c_fc/bias"]
        return self.gelu(wide) @ w["mlp/c_proj/weight"] + w["mlp/c_proj/bias"]

    def forward(self, ids):
        table = self.w["transformer/wte/weight"]
        places = self.w["transformer/wpe/weight"]
        x = table[ids] + places[torch.arange(ids.size(1))]
        for i in range(self.layers):
            w = self.of_layer(i)
            n = self.layer_norm(x, w["ln_1/weight"], w["ln_1/bias"])
            x = x + self.attention(w, n)
            n = self.layer_norm(x, w["ln_2/weight"], w["ln_2/bias"])
            x = x + self.feed_forward(w, n)
        gain, shift = (
            self.w[f"transformer/ln_f/{name}"] for name in ("weight", "bias")
        )
        x = self.layer_norm(x, gain, shift)
        return x @ self.w["lm_head/weight"].T


class NeoX(Port):
    """A GPT-NeoX that rotates a quarter of each head. One weight holds q, k
    and v, head by head."""

    stem = "gpt_neox/layers"
    heads, size, rotated = 4, 16, 4
    turn = Fused.rotate

    def rotate(self, x):
        part, rest = x[..., : self.rotated], x[..., self.rotated :]
        n = self.rotated
        speeds = 10_000.0 ** -(torch.arange(0, n, 2).double() / n)
        angles = torch.arange(x.size(2)).double()[:, None] * speeds
        angles = torch.cat([angles, angles], -1).to(x.dtype)
        part = self.turn(part, angles.cos(), angles.sin())
        return torch.cat([part, rest], -1)

    def attention(self, w, x):
        batch, time, width = x.shape
        qkv = self.linear(w, "attention/query_key_value", x)
        qkv = qkv.view(batch, time, self.heads, 3 * self.size)
        q, k, v = qkv.transpose(1, 2).chunk(3, -1)
        q, k = self.rotate(q), self.rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, time, width)
        return self.linear(w, "attention/dense", y)

    def linear(self, w, name, x):
        return F.linear(x, w[f"{name}/weight"], w[f"{name}/bias"])

    def norm(self, w, name, x):
        gain, shift = w[f"{name}/weight"], w[f"{name}/bias"]
        return F.layer_norm(x, (x.size(-1),), gain, shift, 1e-5)

    def forward(self, ids):
        x = F.embedding(ids, self.w["gpt_neox/embed_in/weight"])
        for i in range(self.layers):
            w = self.of_layer(i)
            h = self.norm(w, "post_attention_layernorm", x)
            h = F.gelu(self.linear(w, "mlp/dense_h_to_4h", h))
            h = self.linear(w, "mlp/dense_4h_to_h", h)
            n = self.norm(w, "input_layernorm", x)
            x = x + h + self.attention(w, n)
        x = self.norm(self.w, "gpt_neox/final_layer_norm", x)
        return F.linear(x, self.w["lm_head/weight"])
