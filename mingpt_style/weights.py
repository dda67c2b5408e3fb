"""From and to the GPT-2 checkpoint layout, and from minGPT's own files."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shared.config import GPTConfig
from shared.layouts import (
    LINEAR_WEIGHTS,
    load_exactly,
    read_gpt2,
    strip,
    units_apart,
)

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
    bias = state.pop("lm_head.bias", torch.zeros(1))
    if config.tie_weights:
        _require_tied(state["wte.weight"], state["lm_head.weight"], bias)
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
    state = {
        name: tensor.detach().clone()
        for name, tensor in strip(model.state_dict(), "transformer.").items()
    }
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
    state = strip(state, "_orig_mod.", "transformer.")
    for name in [n for n in state if n.endswith(".weight")]:
        block_or_norm = name.startswith(("h.", "ln_f."))
        bias = name.removesuffix("weight") + "bias"
        if block_or_norm and bias not in state:
            state[bias] = state[name].new_zeros(state[name].size(0))
    return from_gpt2(_transpose_linears(state), config)


def _transpose_linears(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.t().contiguous()
        if name.endswith(LINEAR_WEIGHTS)
        else tensor
        for name, tensor in state.items()
    }


def _require_tied(wte: Tensor, lm_head: Tensor, bias: Tensor) -> None:
    # Four units: dividing and multiplying by sqrt(d_model) costs up to two.
    if not units_apart(wte, lm_head) <= 4:
        raise ValueError(
            "tie_weights=True, but lm_head.weight differs from wte.weight "
            f"by up to {(wte - lm_head).abs().max():.3g}"
        )
    if bias.any():
        raise ValueError(
            "tie_weights=True, but lm_head.bias is up to "
            f"{bias.abs().max():.3g}"
        )
