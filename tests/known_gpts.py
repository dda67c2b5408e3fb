"""GPTs as well-known repositories write them, for weights in GPT-2's layout.

nanoGPT answers for the last position alone unless it is given targets, and
its attention is the fused kernel; minGPT keeps a mask as a buffer and calls
its MLP through a lambda, which no copy survives; the post GPT from Scratch
has three projections and a sequence of blocks.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpt_duet.checkpoint.other_layouts import nanogpt_from_gpt2


class NanoAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = self.attend(q, k, v)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MinAttention(NanoAttention):
    def __init__(self, config):
        super().__init__(config)
        size = config.block_size
        mask = torch.tril(torch.ones(size, size)).view(1, 1, size, size)
        self.register_buffer("bias", mask, persistent=False)

    def attend(self, q, k, v):
        T = q.size(2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return att @ v


class NewGELU(nn.Module):
    def forward(self, x):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class NanoBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = NanoAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
            }
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        h = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp.c_proj(h)


class MinBlock(NanoBlock):
    def __init__(self, config):
        super().__init__(config)
        self.attn = MinAttention(config)
        m, act = self.mlp, NewGELU()
        self.mlpf = lambda x: m.c_proj(act(m.c_fc(x)))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class NanoGPT(nn.Module):
    block = NanoBlock

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(
                    self.block(config) for _ in range(config.n_layer)
                ),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def hidden(self, idx):
        pos = torch.arange(0, idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1))


class MinGPT(NanoGPT):
    block = MinBlock

    def forward(self, idx, targets=None):
        return self.lm_head(self.hidden(idx)), None


class ScratchAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.key = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.num_heads = config.n_head

    def forward(self, x):
        B, T, _ = x.shape
        k_t = self.key(x).reshape(B, T, self.num_heads, -1)
        k_t = k_t.permute(0, 2, 3, 1)
        v = self.value(x).reshape(B, T, self.num_heads, -1).transpose(1, 2)
        q = self.query(x).reshape(B, T, self.num_heads, -1).transpose(1, 2)
        attn = torch.matmul(q, k_t) / math.sqrt(q.size(-1))
        mask = torch.tril(torch.ones(1, 1, T, T, device=x.device))
        attn = attn.masked_fill(mask == 0, float("-inf"))
        attn = F.softmax(attn, dim=-1)
        y = torch.matmul(attn, v).transpose(1, 2).reshape(B, T, -1)
        return self.proj(y)


class ScratchBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn = ScratchAttention(config)
        self.ff = nn.Sequential(
            nn.Linear(C, 4 * C), nn.GELU("tanh"), nn.Linear(4 * C, C)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ff(self.ln2(x))


class ScratchGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        V, C = config.vocab_size, config.n_embd
        self.tok_embed = nn.Embedding(V, C)
        self.pos_embed = nn.Parameter(torch.zeros(1, config.block_size, C))
        self.blocks = nn.Sequential(
            *[ScratchBlock(config) for _ in range(config.n_layer)]
        )
        self.ln = nn.LayerNorm(C)
        self.fc = nn.Linear(C, V)

    def forward(self, x):
        x = self.tok_embed(x) + self.pos_embed[:, : x.size(1), :]
        return self.fc(self.ln(self.blocks(x)))


def nano(state, config, cls=NanoGPT):
    model = cls(config).to(state["wte.weight"].dtype)
    model.load_state_dict(nanogpt_from_gpt2(state))
    return model


SCRATCH = {  # the post's names, and nanoGPT's
    "fc.": "lm_head.",
    "ln.": "transformer.ln_f.",
    "tok_embed.": "transformer.wte.",
    "pos_embed": "transformer.wpe.weight",
    "blocks.": "transformer.h.",
    "ln1": "ln_1",
    "ln2": "ln_2",
    "attn.proj": "attn.c_proj",
    "ff.0": "mlp.c_fc",
    "ff.2": "mlp.c_proj",
}


def scratch(state, config):
    model = ScratchGPT(config).to(state["wte.weight"].dtype)
    state = {"lm_head.bias": torch.tensor(0.0)} | nanogpt_from_gpt2(state)
    for name in [name for name in state if "c_attn" in name]:
        for part, one in zip(
            ("query", "key", "value"), state.pop(name).chunk(3), strict=True
        ):
            state[name.replace("c_attn", part)] = one
    for name, parameter in model.named_parameters():
        for theirs, nanos in SCRATCH.items():
            name = name.replace(theirs, nanos)
        parameter.data.copy_(state[name])
    return model
