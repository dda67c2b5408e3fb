"""Make boolean masks: True if the row's position may see the column's.

The attention of annotated uses `subsequent_mask`. mingpt_style calls PyTorch's
fused attention with `is_causal` instead, and passes a mask only to decode with
a cache.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def subsequent_mask(
    size: int, device: torch.device | str | None = None
) -> Bool[Tensor, "1 size size"]:
    """Return a mask in which each position sees itself and the past.

    Args:
        size: number of positions.
        device: device of the mask.

    Source: The Annotated Transformer, "Decoder".
    """
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def causal_mask(
    max_len: int, device: torch.device | str | None = None
) -> Bool[Tensor, "1 1 max_len max_len"]:
    """Return a causal mask with axes for batch and heads.

    Args:
        max_len: length of the longest sequence for which the mask is used.
        device: device of the mask.

    Source: minGPT, which keeps this mask in a buffer.
    """
    return subsequent_mask(max_len, device).unsqueeze(0)


def slice_mask(
    mask: Bool[Tensor, "1 1 max_len max_len"], size: int
) -> Bool[Tensor, "1 1 size size"]:
    """Cut a mask to the length of a sequence.

    Raises:
        ValueError: if the sequence is longer than the mask.
    """
    if not 0 <= size <= mask.size(-1):
        raise ValueError(
            f"a mask for {mask.size(-1)} positions has no slice for {size}"
        )
    return mask[..., :size, :size]


def padding_mask(
    tokens: Int[Tensor, "batch time"], pad: int
) -> Bool[Tensor, "batch 1 time"]:
    """Return a mask that hides padding from every position.

    Args:
        tokens: ids, padded with `pad` to equal length.
        pad: the id that stands for padding.
    """
    return (tokens != pad).unsqueeze(-2)


def combine_masks(*masks: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Return a mask that shows only the positions that all masks show.

    Args:
        *masks: one or more masks that broadcast with each other.

    Raises:
        ValueError: if there is no mask, if masks are not boolean or differ in
            their number of axes, or if a position sees no position. The
            attention of such a position would be 0 / 0. Padding on the left
            has this effect under a causal mask; pad on the right instead.
    """
    if not masks:
        raise ValueError("combining requires at least one mask, got 0")
    for mask in masks:
        if mask.dtype != torch.bool or mask.dim() != masks[0].dim():
            # with different numbers of axes, one mask's rows would broadcast
            # over the other's heads
            raise ValueError(
                f"masks must be bool and of {masks[0].dim()} axes like the "
                f"first, got {mask.dtype} of shape {tuple(mask.shape)}"
            )
    try:
        torch.broadcast_shapes(*(mask.shape for mask in masks))
    except RuntimeError:
        shapes = " and ".join(str(tuple(mask.shape)) for mask in masks)
        raise ValueError(f"masks do not fit each other: {shapes}") from None
    combined = masks[0]
    for mask in masks[1:]:
        combined = combined & mask
    blind = (~combined.any(-1)).nonzero()
    if len(blind) > 0:
        *row, position = blind[0].tolist()
        raise ValueError(
            f"position {position} of row {row[0] if row else 0} sees no "
            f"position ({len(blind)} such positions)"
        )
    return combined
