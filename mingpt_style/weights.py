"""From and to the GPT-2 checkpoint layout, and from minGPT's own files."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gpt_duet.checkpoint.gpt2_layout import (
    LINEAR_WEIGHTS,
    load_exactly,
    read_gpt2,
    require_tied,
    strip,
)
from gpt_duet.checkpoint.other_layouts import bring_to_gpt2
from gpt_duet.config import GPTConfig

from .model import GPT, build_model


def from_gpt2(state: Mapping[str, Tensor], config: GPTConfig) -> GPT:
    """Build the model that computes what a GPT-2 checkpoint computes.

    The names are the layout's own; the linear weights are transposed. The
    head gets a bias only where the checkpoint brings one that is not zero.

    Args:
        state: tensors named as GPT-2's, with or without "transformer.".
        config: the sizes, and what weights do not show.

    Raises:
        ValueError: where names or shapes do not fit, or where tie_weights
            asks to tie two matrices that differ.
    """
    state = read_gpt2(state, config)
    if config.tie_weights:
        require_tied(state)
    bias = state.pop("lm_head.bias", torch.zeros(1))
    with torch.device("meta"):
        model = build_model(config)
    names = {
        name if name.startswith("lm_head") else f"transformer.{name}": tensor
        for name, tensor in state.items()
    }
    load_exactly(model, _transpose_linears(names))
    if config.tie_weights:
        model.lm_head.weight = model.transformer.wte.weight
    if bias.any():
        model.lm_head.bias = nn.Parameter(bias.clone())
    return model


def to_gpt2(model: GPT) -> dict[str, Tensor]:
    """Return the weights in the GPT-2 layout, copied, without a prefix."""
    ours = strip(model.state_dict(), "_orig_mod.", "transformer.")
    state = {name: tensor.detach().clone() for name, tensor in ours.items()}
    if model.lm_head.weight is model.transformer.wte.weight:
        del state["lm_head.weight"]
    return _transpose_linears(state)


def from_nanogpt(state: Mapping[str, Tensor], config: GPTConfig) -> GPT:
    """Build the model from a state dict of minGPT or nanoGPT.

    Compiled models' "_orig_mod." and mask buffers are dropped; biases that
    are absent (nanoGPT's bias=False) are zeros, which is the same function.

    Args:
        state: tensors named as minGPT's, linear weights (out, in).
        config: the sizes, and what weights do not show.

    Raises:
        ValueError: where names or shapes do not fit.
    """
    return from_gpt2(bring_to_gpt2(state, "nanogpt"), config)


def _transpose_linears(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.t().contiguous()
        if name.endswith(LINEAR_WEIGHTS)
        else tensor
        for name, tensor in state.items()
    }
