"""Convert weights from and to the GPT-2 checkpoint layout.

The conversion makes up for all differences to GPT-2: the embedding's scale,
three projections instead of one, and the n - 1 in the standard deviation.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gpt_duet.checkpoint.gpt2_layout import load_exactly, read_gpt2, strip
from gpt_duet.config import GPTConfig

from .layers import LayerNorm, Norm
from .model import DecoderModel, build_model

# Names of a layer's norms: GPT-2's name, and this style's.
NORMS = {"ln_1": "sublayer.0.norm", "ln_2": "sublayer.1.norm"}
LINEARS = {
    "attn.c_proj": "self_attn.linears.3",
    "mlp.c_fc": "feed_forward.w_1",
    "mlp.c_proj": "feed_forward.w_2",
}


def from_gpt2(
    state: Mapping[str, Tensor],
    config: GPTConfig,
    norm: Norm = nn.LayerNorm,
) -> DecoderModel:
    """Build a model from the weights of a GPT-2 checkpoint.

    Args:
        state: tensors by GPT-2's names, with or without "transformer.".
        config: the model's sizes, and facts that weights do not show.
        norm: torch's LayerNorm, as in GPT-2. With this style's own LayerNorm,
            whose eps is outside the root, results change by 1e-5 to 1e-2.

    Raises:
        ValueError: if names or shapes do not fit.
    """
    state = read_gpt2(state, config)
    with torch.device("meta"):
        model = build_model(config, norm)

    wte = state["wte.weight"]
    ours = {
        "embed.0.lut.weight": wte / math.sqrt(config.n_embd),
        "embed.1.pe": state["wpe.weight"].unsqueeze(0),
        "generator.proj.weight": state["lm_head.weight"],
        "generator.proj.bias": state.get(
            "lm_head.bias", wte.new_zeros(config.vocab_size)
        ),
    }
    for i in range(config.n_layer):
        linears = f"decoder.layers.{i}.self_attn.linears"
        weight = state[f"h.{i}.attn.c_attn.weight"].t()
        bias = state[f"h.{i}.attn.c_attn.bias"]
        for n, (w, b) in enumerate(
            zip(weight.chunk(3), bias.chunk(3), strict=True)
        ):
            ours[f"{linears}.{n}.weight"] = w
            ours[f"{linears}.{n}.bias"] = b
        for theirs, mine in LINEARS.items():
            name = f"decoder.layers.{i}.{mine}"
            ours[f"{name}.weight"] = state[f"h.{i}.{theirs}.weight"].t()
            ours[f"{name}.bias"] = state[f"h.{i}.{theirs}.bias"]
    gain, shift, factor = _norm_parts(model)
    for theirs, mine in _norm_names(config):
        ours[f"{mine}.{gain}"] = state[f"{theirs}.weight"] * factor
        ours[f"{mine}.{shift}"] = state[f"{theirs}.bias"]

    load_exactly(model, ours)
    return model


def to_gpt2(model: DecoderModel) -> dict[str, Tensor]:
    """Return copies of the weights in the GPT-2 layout, without a prefix.

    Raises:
        ValueError: for a norm that is neither torch's nor this style's.
    """
    config, ours = model.config, strip(model.state_dict(), "_orig_mod.")

    state = {
        "wte.weight": ours["embed.0.lut.weight"] * math.sqrt(config.n_embd),
        "wpe.weight": ours["embed.1.pe"].squeeze(0),
        "lm_head.weight": ours["generator.proj.weight"],
        "lm_head.bias": ours["generator.proj.bias"],
    }
    for i in range(config.n_layer):
        linears = f"decoder.layers.{i}.self_attn.linears"
        weights = [ours[f"{linears}.{n}.weight"] for n in range(3)]
        biases = [ours[f"{linears}.{n}.bias"] for n in range(3)]
        state[f"h.{i}.attn.c_attn.weight"] = torch.cat(weights).t()
        state[f"h.{i}.attn.c_attn.bias"] = torch.cat(biases)
        for theirs, mine in LINEARS.items():
            name = f"decoder.layers.{i}.{mine}"
            state[f"h.{i}.{theirs}.weight"] = ours[f"{name}.weight"].t()
            state[f"h.{i}.{theirs}.bias"] = ours[f"{name}.bias"]
    gain, shift, factor = _norm_parts(model)
    for theirs, mine in _norm_names(config):
        state[f"{theirs}.weight"] = ours[f"{mine}.{gain}"] / factor
        state[f"{theirs}.bias"] = ours[f"{mine}.{shift}"]

    contiguous = torch.contiguous_format
    return {k: v.clone(memory_format=contiguous) for k, v in state.items()}


def _norm_names(config: GPTConfig) -> list[tuple[str, str]]:
    """Return GPT-2's name and this style's for every norm of the model."""
    layers = [
        (f"h.{i}.{theirs}", f"decoder.layers.{i}.{mine}")
        for i in range(config.n_layer)
        for theirs, mine in NORMS.items()
    ]
    return [*layers, ("ln_f", "decoder.norm")]


def _norm_parts(model: DecoderModel) -> tuple[str, str, float]:
    """Return the names of a norm's gain and shift, and gain / GPT-2's gain."""
    norm, n = model.decoder.norm, model.config.n_embd
    if type(norm) is LayerNorm:
        return "a_2", "b_2", math.sqrt(n / (n - 1))
    whole = norm.state_dict().keys() == {"weight", "bias"}
    if type(norm) is nn.LayerNorm and whole:
        return "weight", "bias", 1.0
    raise ValueError(f"GPT-2 has no norm like {type(norm).__name__}")
