"""Layouts of checkpoints that others wrote, and the way to GPT-2's.

"gpt2" is what transformers saves, "nanogpt" a state dict of nanoGPT or
minGPT, which name alike and keep linear weights (out, in), and "scratch"
the layout of the post "GPT from Scratch", with three projections for one.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .gpt2_layout import (
    LINEAR_WEIGHTS,
    State,
    axes,
    first_few,
    require_shapes,
    strip,
)

# In the post's block: GPT-2's name, and the post's.
_SCRATCH_PARTS = {
    "ln_1": "ln1",
    "ln_2": "ln2",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "ff.0",
    "mlp.c_proj": "ff.2",
}
_SCRATCH_QKV = ("attn.query", "attn.key", "attn.value")


def recognise(state: Mapping[str, Tensor]) -> str:
    """Return the layout's name: "gpt2", "nanogpt" or "scratch".

    ValueError lists the keys that fit none.
    """
    names = strip(state, "_orig_mod.", "transformer.")
    fused = names.get("h.0.attn.c_attn.weight")
    if fused is not None:
        shape = tuple(fused.shape)
        if len(shape) == 2 and shape[1] == 3 * shape[0]:
            return "gpt2"
        if len(shape) == 2 and shape[0] == 3 * shape[1]:
            return "nanogpt"
        raise ValueError(
            "h.0.attn.c_attn.weight is neither GPT-2's (width, 3 * width) "
            f"nor nanoGPT's (3 * width, width): its shape is {shape}"
        )
    if any(name.startswith("blocks.0.attn.key.") for name in names):
        return "scratch"
    raise ValueError(
        "unknown checkpoint layout: it has neither h.0.attn.c_attn.weight "
        "(GPT-2, nanoGPT, minGPT) nor blocks.0.attn.key.weight (GPT from "
        f"Scratch), but {first_few(sorted(state)) or 'no tensors at all'}"
    )


def bring_to_gpt2(state: Mapping[str, Tensor], layout: str) -> State:
    """Rename, transpose and join until the names are GPT-2's.

    Args:
        state: in the layout, whole.
        layout: as `recognise` names it.

    Returns:
        Names without "transformer.", no mask buffers; lm_head.weight where
        the file has it.
    """
    if layout == "gpt2":
        return strip(state, "transformer.")
    return _nanogpt(state) if layout == "nanogpt" else _scratch(state)


def nanogpt_from_gpt2(state: Mapping[str, Tensor]) -> State:
    """Name and turn tensors as nanoGPT's and minGPT's state dicts do."""
    return with_prefix(_transpose_linears(state))


def with_prefix(state: Mapping[str, Tensor]) -> State:
    """Put "transformer." before every name but the head's."""
    return {
        name if name.startswith("lm_head.") else f"transformer.{name}": tensor
        for name, tensor in state.items()
    }


def count_layers(names: Iterable[str], stem: str = "h") -> int:
    """Count the different numbers after the stem."""
    matches = (re.match(rf"{stem}\.(\d+)\.", name) for name in names)
    return len({match[1] for match in matches if match})


def _nanogpt(state: Mapping[str, Tensor]) -> State:
    state = strip(state, "_orig_mod.", "transformer.")
    # safetensors' save_model keeps one name of a tied matrix
    if "wte.weight" not in state and "lm_head.weight" in state:
        state["wte.weight"] = state["lm_head.weight"]
    weights = [
        name
        for name in state
        if name.startswith(("h.", "ln_f.")) and name.endswith(".weight")
    ]
    biases = [f"{name.removesuffix('weight')}bias" for name in weights]
    if not any(bias in state for bias in biases):  # nanoGPT's bias=False
        for weight, bias in zip(weights, biases, strict=True):
            state[bias] = state[weight].new_zeros(state[weight].size(0))
    return _transpose_linears(state)


def _transpose_linears(state: Mapping[str, Tensor]) -> State:
    return {
        name: tensor.t() if name.endswith(LINEAR_WEIGHTS) else tensor
        for name, tensor in state.items()
    }


def _scratch(state: Mapping[str, Tensor]) -> State:
    state = strip(state)
    n_layer = count_layers(state, "blocks")
    require_shapes(state, _scratch_shapes(state, n_layer))
    gpt2 = {
        "wte.weight": state["tok_embed.weight"],
        "wpe.weight": state["pos_embed"].squeeze(0),
    }
    for i in range(n_layer):
        for kind in ("weight", "bias"):
            gpt2[f"h.{i}.attn.c_attn.{kind}"] = torch.cat(
                [state[f"blocks.{i}.{part}.{kind}"] for part in _SCRATCH_QKV]
            ).t()
            for theirs, posts in _SCRATCH_PARTS.items():
                tensor = state[f"blocks.{i}.{posts}.{kind}"]
                gpt2[f"h.{i}.{theirs}.{kind}"] = tensor.t()
    for kind in ("weight", "bias"):
        gpt2[f"ln_f.{kind}"] = state[f"ln.{kind}"]
        gpt2[f"lm_head.{kind}"] = state[f"fc.{kind}"]
    return gpt2


def _scratch_shapes(
    state: Mapping[str, Tensor], n_layer: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the post's tensors, for the sizes that three of them show."""
    V, C = axes(state, "tok_embed.weight", 2)
    _, T, _ = axes(state, "pos_embed", 3)
    inner, _ = axes(state, "blocks.0.ff.0.weight", 2)
    matrices = {part: (C, C) for part in (*_SCRATCH_QKV, "attn.proj")}
    matrices |= {"ff.0": (inner, C), "ff.2": (C, inner)}
    block: dict[str, tuple[int, ...]] = {}
    for part, (rows, columns) in matrices.items():
        block |= {f"{part}.weight": (rows, columns), f"{part}.bias": (rows,)}
    for norm in ("ln1", "ln2"):
        block |= {f"{norm}.weight": (C,), f"{norm}.bias": (C,)}
    return {
        "tok_embed.weight": (V, C),
        "pos_embed": (1, T, C),
        **{
            f"blocks.{i}.{name}": shape
            for i in range(n_layer)
            for name, shape in block.items()
        },
        "ln.weight": (C,),
        "ln.bias": (C,),
        "fc.weight": (V, C),
        "fc.bias": (V,),
    }
