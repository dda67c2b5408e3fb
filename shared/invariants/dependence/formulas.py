"""Fused kernels by their formula, in torch's plain operations.

Each takes a kernel's arguments by name, and returns its result or results.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
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
    "_grouped_mm": grouped_product,
    "flex_attention": flex_attention,
}
