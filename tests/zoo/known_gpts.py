"""GPTs as well-known repositories write them.

Weights have GPT-2's layout. nanoGPT calls the fused kernel, and returns only
the last position unless it gets targets. minGPT keeps its mask as a buffer. It
calls its MLP by a lambda, which breaks when the model is copied. The post GPT
from Scratch has three projections and a sequence of blocks.

Other models need arguments in a command. makemore's model declares its
block_size but not its vocabulary. Meta's Llama allocates rows and cache once,
and start_pos says where a piece begins. labml's transformer takes ids of shape
(time, batch).
"""

import math
from dataclasses import dataclass

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


SCRATCH = {  # from the post's names to those of nanoGPT
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


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


# --- makemore ---------------------------------------------------------------


@dataclass
class ModelConfig:
    block_size: int = None  # length of the input sequences of integers
    vocab_size: int = None  # the input integers are in [0, vocab_size - 1]
    n_layer: int = 2
    n_embd: int = 32
    n_head: int = 4


class Transformer(NanoGPT):
    def __init__(self, config):
        super().__init__(config)
        self.block_size = config.block_size
        del self.config

    def forward(self, idx, targets=None):
        _b, t = idx.size()
        assert t <= self.block_size, f"Cannot forward sequence of length {t}"
        logits = self.lm_head(self.hidden(idx))
        if targets is None:
            return logits, None
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)


# --- Llama ------------------------------------------------------------------


@dataclass
class ModelArgs:
    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    vocab_size: int = -1  # defined later by tokenizer
    norm_eps: float = 1e-5
    max_batch_size: int = 4
    max_seq_len: int = 32


def apply_rotary_emb(x, freqs_cis):
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    x_out = torch.view_as_real(x_ * freqs_cis.unsqueeze(1)).flatten(3)
    return x_out.type_as(x)


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads, self.head_dim = args.n_heads, args.dim // args.n_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(args.dim, args.dim, bias=False) for _ in range(4)
        )
        room = args.max_batch_size, args.max_seq_len, self.heads
        self.cache_k = torch.zeros(*room, self.head_dim)
        self.cache_v = torch.zeros(*room, self.head_dim)

    def forward(self, x, start_pos, freqs_cis, mask):
        bsz, seqlen, _ = x.shape
        shape = bsz, seqlen, self.heads, self.head_dim
        xq, xk = self.wq(x).view(shape), self.wk(x).view(shape)
        xq, xk = (apply_rotary_emb(x, freqs_cis) for x in (xq, xk))
        self.cache_k = self.cache_k.to(xq)
        self.cache_v = self.cache_v.to(xq)
        end = start_pos + seqlen
        self.cache_k[:bsz, start_pos:end] = xk
        self.cache_v[:bsz, start_pos:end] = self.wv(x).view(shape)
        keys = self.cache_k[:bsz, :end].transpose(1, 2)
        values = self.cache_v[:bsz, :end].transpose(1, 2)
        scores = xq.transpose(1, 2) @ keys.mT / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = (scores @ values).transpose(1, 2).contiguous()
        return self.wo(output.view(bsz, seqlen, -1))


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args)
        self.w1 = nn.Linear(args.dim, 2 * args.dim, bias=False)
        self.w2 = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, 2 * args.dim, bias=False)
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)

    def forward(self, x, start_pos, freqs_cis, mask):
        norm = self.attention_norm(x)
        h = x + self.attention(norm, start_pos, freqs_cis, mask)
        x = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = params
        self.tok_embeddings = nn.Embedding(params.vocab_size, params.dim)
        self.layers = nn.ModuleList(
            TransformerBlock(params) for _ in range(params.n_layers)
        )
        self.norm = nn.RMSNorm(params.dim, params.norm_eps)
        self.output = nn.Linear(params.dim, params.vocab_size, bias=False)
        width = params.dim // params.n_heads
        freqs = 10000.0 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(2 * params.max_seq_len), freqs)
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    @torch.inference_mode()
    def forward(self, tokens, start_pos: int):
        _bsz, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        self.freqs_cis = self.freqs_cis.to(h.device)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), -math.inf, device=h.device)
            mask = torch.triu(mask, diagonal=1)
            past = torch.zeros((seqlen, start_pos), device=h.device)
            mask = torch.hstack([past, mask]).type_as(h)
        for layer in self.layers:
            h = layer(h, start_pos, freqs_cis, mask)
        return self.output(self.norm(h)).float()


# --- labml: (time, batch) ---------------------------------------------------


class MultiHeadAttention(nn.Module):
    def __init__(self, heads, d_model):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        shape = *x.shape[:2], self.heads, self.d_k
        q, k, v = (
            f(x).view(shape) for f in (self.query, self.key, self.value)
        )
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / self.d_k**0.5
        scores = scores.masked_fill(mask == 0, -math.inf)
        x = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(dim=1), v)
        return self.output(x.reshape(*x.shape[:2], -1))


class AutoregressiveModel(nn.Module):
    """The model that labml builds by default, with learned positions."""

    def __init__(self, n_vocab=65, d_model=32, heads=4, max_len=32):
        super().__init__()
        self.src_embed = nn.Embedding(n_vocab, d_model)
        self.positional = nn.Parameter(torch.zeros(max_len, 1, d_model))
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = MultiHeadAttention(heads, d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 64), nn.ReLU(), nn.Linear(64, d_model)
        )
        self.generator = nn.Linear(d_model, n_vocab)
        self.mask = None

    def forward(self, x: torch.Tensor):
        if self.mask is None or self.mask.size(0) != len(x):
            ones = torch.ones(len(x), len(x), device=x.device)
            self.mask = ones.tril().view(len(x), len(x), 1, 1)
        x = self.src_embed(x)
        x = x + self.positional[: len(x)]
        x = x + self.attention(self.norm_1(x), self.mask.to(x.device))
        x = x + self.feed_forward(self.norm_2(x))
        return self.generator(x), None
