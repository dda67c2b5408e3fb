"""Boolean masks: True where a position (row) may see another (column).

annotated attends with `subsequent_mask`; mingpt_style's kernel gets
`is_causal` instead, and has a mask only where it decodes with a cache.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def subsequent_mask(
    size: int, device: torch.device | str | None = None
) -> Bool[Tensor, "1 size size"]:
    """Hide what comes after: each position sees itself and the past.

    Args:
        size: number of positions.
        device: where the mask is made.

    Source: The Annotated Transformer, "Decoder".
    """
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def causal_mask(
    max_len: int, device: torch.device | str | None = None
) -> Bool[Tensor, "1 1 max_len max_len"]:
    """The same for a batch of heads: one mask, broadcast over both.

    Args:
        max_len: longest sequence the mask can be sliced to.
        device: where the mask is made.

    Source: minGPT's buffer, without the buffer.
    """
    return subsequent_mask(max_len, device).unsqueeze(0)


def slice_mask(
    mask: Bool[Tensor, "1 1 max_len max_len"], size: int
) -> Bool[Tensor, "1 1 size size"]:
    """Cut a mask for a maximum length down to a shorter sequence.

    Raises:
        ValueError: where the sequence is longer than the mask.
    """
    if not 0 <= size <= mask.size(-1):
        raise ValueError(
            f"a mask for {mask.size(-1)} positions has no slice for {size}"
        )
    return mask[..., :size, :size]


def padding_mask(
    tokens: Int[Tensor, "batch time"], pad: int
) -> Bool[Tensor, "batch 1 time"]:
    """Hide the padding from every position.

    Args:
        tokens: ids, padded with `pad` to equal length.
        pad: the id that is not a token.
    """
    return (tokens != pad).unsqueeze(-2)


def combine_masks(*masks: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Show what every one of the masks shows.

    Args:
        *masks: one or more masks that broadcast against each other.

    Raises:
        ValueError: for no mask; for masks that are not boolean, or differ
            in their number of axes; and where a row is left with nothing to
            see: its attention would be 0 / 0. Padding on the left does this
            under a causal mask; pad on the right.
    """
    if not masks:
        raise ValueError("combining needs at least one mask, got 0")
    for mask in masks:
        if mask.dtype != torch.bool or mask.dim() != masks[0].dim():
            # the batch of one would meet the heads of the other
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
            f"position {position} of row {row[0] if row else 0} has nothing "
            f"to see ({len(blind)} such positions)"
        )
    return combined
