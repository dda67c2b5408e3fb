"""Build other decoders of the same shape, with random weights."""

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_duet.checkpoint.config_json import transformers_config
from gpt_duet.config import ACTIVATIONS, GPTConfig
from gpt_duet.running.program import Program
from gpt_duet.targets import load_target

from . import PEERS as NAMES

ONE_GELU = "gelu_pytorch_tanh"


def transformers_gpt2(
    config: GPTConfig, attention: str = "sdpa", gelu_tanh: str = "gelu_new"
) -> nn.Module:
    """Build transformers' GPT2LMHeadModel in the shape of a config.

    By default, GELU by tanh is written out ("gelu_new"). ONE_GELU computes it
    in one kernel, as the styles do, which is several times as fast.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2Config(**json.loads(transformers_config(config)))
    theirs.activation_function = gelu_tanh
    theirs.use_cache = False  # no cache in a forward pass; decoding enables it
    theirs._attn_implementation = attention
    return GPT2LMHeadModel(theirs)


class TorchDecoder(nn.Module):
    """torch.nn.TransformerEncoder with a causal mask, tables and a head.

    It uses GELU by tanh, as GPT-2 does. Because the activation is a callable,
    the module does not take its fused path, which is slower on a CPU.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        layer = nn.TransformerEncoderLayer(
            config.n_embd, config.n_head, config.inner_size, config.dropout,
            partial(F.gelu, approximate="tanh"),
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(
            layer, config.n_layer, nn.LayerNorm(config.n_embd),
            # no nested tensors, which are for rows of unequal length
            enable_nested_tensor=False,
        )  # fmt: skip
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every position."""
        T = tokens.size(1)
        pos = torch.arange(T, device=tokens.device)
        x = self.wte(tokens) + self.wpe(pos)
        mask = nn.Transformer.generate_square_subsequent_mask(
            T, device=tokens.device, dtype=x.dtype
        )
        return self.head(self.encoder(x, mask=mask, is_causal=True))


def x_transformers(config: GPTConfig) -> nn.Module:
    """Build x-transformers' decoder in the shape of a config."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=config.n_embd, depth=config.n_layer, heads=config.n_head,
        attn_dim_head=config.n_embd // config.n_head, attn_flash=True,
        ff_mult=config.inner_size / config.n_embd,
        ff_custom_activation=ACTIVATIONS[config.activation](),
    )  # fmt: skip
    return TransformerWrapper(
        num_tokens=config.vocab_size, max_seq_len=config.block_size,
        attn_layers=layers, tie_embedding=config.tie_weights,
    )  # fmt: skip


MAKERS: Sequence[Callable[[GPTConfig], Any]] = (
    transformers_gpt2,
    partial(transformers_gpt2, attention="eager"),
    partial(transformers_gpt2, gelu_tanh=ONE_GELU),
    TorchDecoder,
    x_transformers,
)
PEERS = dict(zip(NAMES, MAKERS, strict=True))


def build_peer(name: str, config: GPTConfig) -> tuple[Any, bool]:
    """Build one of PEERS, or a user's model.

    Also return whether the config set the model's sizes.

    A user's model is "package.module:factory" or "path/to/file.py:factory".
    A factory gets the config if it requires one argument, or if its first
    argument is named config. Other factories choose the sizes themselves.
    """
    if name not in PEERS and ":" not in name:
        raise ValueError(
            f"no peer {name!r}; give one of {', '.join(PEERS)}, or your own "
            "model as package.module:factory"
        )
    build: Any = PEERS.get(name) or load_target(name, None, None)
    if isinstance(build, nn.Module | Program):
        return build, False
    try:
        wanted = inspect.signature(build).bind(config).signature
        first, *_ = wanted.parameters.values()
        takes = first.default is first.empty or first.name == "config"
    except (TypeError, ValueError):
        takes = False
    return (build(config) if takes else build()), takes
