"""Fused kernels by their formula, in torch's plain operations.

Each takes a kernel's arguments by name, and returns its result or results.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = Mapping[str, Any]


def attention(of: Arguments) -> Tensor:
    """Return softmax(q k^T scale + mask) v, as every kernel computes it."""
    query, key, value = of["query"], of["key"], of["value"]
    heads = query.size(-3) // key.size(-3)
    if heads > 1:
        key = key.repeat_interleave(heads, -3)
        value = value.repeat_interleave(heads, -3)
    scale = of.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(query.size(-1))
    scores = (query * scale) @ key.transpose(-2, -1)
    if of.get("is_causal"):
        scores = scores.masked_fill(_later(scores), -math.inf)
    mask = of.get("attn_mask")
    mask = of.get("attn_bias") if mask is None else mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def _later(scores: Tensor) -> Tensor:
    """Where a key is later; the first is aligned with the first query."""
    size = scores.shape[-2:]
    ones = torch.ones(size, dtype=torch.bool, device=scores.device)
    return ones.triu(1)


def self_attention(
    x: Tensor,
    heads: int,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kind: int | None,
) -> Tensor:
    """Return what nn.MultiheadAttention computes of one input.

    The mask hides where it is True: kind 0 is (time, time), kind 1 is
    (batch, time), kind 2 is (batch, heads, time, time).
    """
    qkv, qkv_bias, out, out_bias = weights
    q, k, v = (
        t.unflatten(-1, (heads, -1)).transpose(1, 2)
        for t in F.linear(x, qkv, qkv_bias).chunk(3, -1)
    )
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask != 0
        if kind == 1:
            mask = mask[:, None, None, :]
        mask = ~mask
    y = attention({"query": q, "key": k, "value": v, "attn_mask": mask})
    return F.linear(y.transpose(1, 2).flatten(-2), out, out_bias)


def multi_head_attention(of: Arguments) -> Tensor | None:
    """Return what the inference path of nn.MultiheadAttention does."""
    if of["query"] is not of["key"] or of["key"] is not of["value"]:
        return None
    weights = tuple(
        of[n] for n in ("qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
    )
    return self_attention(
        of["query"],
        of["num_head"],
        weights,
        of.get("mask"),
        of.get("mask_type"),
    )


def encoder_layer(of: Arguments) -> Tensor:
    """Return what the inference path of nn.TransformerEncoderLayer does."""
    x, size = of["src"], (of["embed_dim"],)
    weights = tuple(
        of[n] for n in ("qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
    )

    def attend(x: Tensor) -> Tensor:
        return self_attention(
            x, of["num_heads"], weights, of.get("mask"), of.get("mask_type")
        )

    def feed_forward(x: Tensor) -> Tensor:
        x = F.linear(x, of["ffn_weight_1"], of["ffn_bias_1"])
        x = F.gelu(x) if of["use_gelu"] else x.relu()
        return F.linear(x, of["ffn_weight_2"], of["ffn_bias_2"])

    def norm(x: Tensor, n: int) -> Tensor:
        weight, bias = of[f"norm_weight_{n}"], of[f"norm_bias_{n}"]
        return F.layer_norm(x, size, weight, bias, of["eps"])

    if of["norm_first"]:
        x = x + attend(norm(x, 1))
        return x + feed_forward(norm(x, 2))
    x = norm(x + attend(x), 1)
    return norm(x + feed_forward(x), 2)


def grouped_product(of: Arguments) -> Tensor | None:
    """Return rows times the matrix of their group, the groups in order."""
    x, weights, ends = of["self"], of["mat2"], of.get("offs")
    if ends is None or x.dim() != 2 or weights.dim() != 3:
        return None
    at = torch.arange(len(x), device=x.device)
    group = (at.unsqueeze(1) >= ends).sum(1).clamp(max=len(weights) - 1)
    return (x.unsqueeze(1) @ weights[group]).squeeze(1)


def flex_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the operator's own eager formula."""
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention(*args, **kwargs)


FORMULAS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
        ),
        attention,
    ),
    "_native_multi_head_attention": multi_head_attention,
    "_transformer_encoder_layer_fwd": encoder_layer,
    "_grouped_mm": grouped_product,
    "flex_attention": flex_attention,
}
