"""GPTs as well-known repositories write them, to be named in one command.

minGPT and nanoGPT are in known_gpts.py; here are their config, Meta's Llama
(rows and cache are given room once, start_pos says where they are), labml's
transformer, which takes (time, batch), and makemore's, which says its
block_size and not its vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from known_gpts import MinGPT, NanoGPT
from torch import nn

__all__ = ["MinGPT", "NanoGPT"]


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


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


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        mean = x.float().pow(2).mean(-1, keepdim=True)
        output = (x.float() * torch.rsqrt(mean + self.eps)).type_as(x)
        return output * self.weight


def apply_rotary_emb(x, freqs_cis):
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    x_out = torch.view_as_real(x_ * freqs_cis.unsqueeze(1)).flatten(3)
    return x_out.type_as(x)


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads, self.head_dim = args.n_heads, args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
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
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

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
        self.norm = RMSNorm(params.dim, params.norm_eps)
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
    """The default of learned positions, along the first axis."""

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
        assert t <= self.block_size, (
            f"Cannot forward sequence of length {t}, block size is only "
            f"{self.block_size}"
        )
        logits = self.lm_head(self.hidden(idx))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)),
                targets.view(-1),
                ignore_index=-1,
            )
        return logits, loss
