"""Convert weights from and to the GPT-2 layout, and from minGPT's files."""

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
    """Build a model from the weights of a GPT-2 checkpoint.

    This model's names are those of GPT-2; its linear weights are transposed.
    The head only gets a bias if the checkpoint has one that is not zero.

    Args:
        state: tensors by GPT-2's names, with or without "transformer.".
        config: the sizes, and facts that weights do not show.

    Raises:
        ValueError: if names or shapes do not fit, or if config.tie_weights is
            set, but the two matrices differ.
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
    """Return copies of the weights in the GPT-2 layout, without a prefix."""
    ours = strip(model.state_dict(), "_orig_mod.", "transformer.")
    state = {name: tensor.detach().clone() for name, tensor in ours.items()}
    if model.lm_head.weight is model.transformer.wte.weight:
        del state["lm_head.weight"]
    return _transpose_linears(state)


def from_nanogpt(state: Mapping[str, Tensor], config: GPTConfig) -> GPT:
    """Build a model from a state dict of minGPT or nanoGPT.

    Mask buffers are removed, and so is a compiled model's prefix "_orig_mod.".
    Missing biases (nanoGPT's bias=False) become zeros, which compute the same
    function.

    Args:
        state: tensors by minGPT's names, with linear weights (out, in).
        config: the sizes, and facts that weights do not show.

    Raises:
        ValueError: if names or shapes do not fit.
    """
    return from_gpt2(bring_to_gpt2(state, "nanogpt"), config)


def _transpose_linears(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.t().contiguous()
        if name.endswith(LINEAR_WEIGHTS)
        else tensor
        for name, tensor in state.items()
    }
