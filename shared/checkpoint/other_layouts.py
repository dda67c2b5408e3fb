"""Convert layouts of checkpoints to and from GPT-2's.

"gpt2" is the layout that transformers saves. "nanogpt" is a state dict of
nanoGPT or minGPT, which use the same names and (out, in) linear weights.
"scratch" is the layout of the post "GPT from Scratch", which has separate
projections for query, key and value.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .gpt2_layout import LINEAR_WEIGHTS, State, first_few, strip

# Patterns of names in GPT from Scratch, with nanoGPT's name for each.
_SCRATCH_NAMES = {
    r"^tok_embed\.": "wte.",
    r"^pos_embed$": "wpe.weight",
    r"^blocks\.": "h.",
    r"\.ln([12])\.": r".ln_\1.",
    r"\.attn\.proj\.": ".attn.c_proj.",
    r"\.ff\.0\.": ".mlp.c_fc.",
    r"\.ff\.2\.": ".mlp.c_proj.",
    r"^ln\.": "ln_f.",
    r"^fc\.": "lm_head.",
}


def recognise(state: Mapping[str, Tensor]) -> str:
    """Return the layout's name: "gpt2", "nanogpt" or "scratch".

    Raises:
        ValueError: for an unknown layout; the message lists the names.
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
        f"Scratch), but {first_few(sorted(state)) or 'no tensors'}"
    )


def bring_to_gpt2(state: Mapping[str, Tensor], layout: str) -> State:
    """Bring tensors to GPT-2's layout: rename, transpose and join them.

    Args:
        state: all tensors, in the layout.
        layout: the layout's name, as `recognise` returns it.

    Returns:
        Tensors by name, without "transformer." and mask buffers.
        lm_head.weight is among them if the file has it.
    """
    if layout == "gpt2":
        return strip(state, "transformer.")
    return _nanogpt(state) if layout == "nanogpt" else _scratch(state)


def nanogpt_from_gpt2(state: Mapping[str, Tensor]) -> State:
    """Rename and transpose tensors for nanoGPT and minGPT."""
    return with_prefix(_transpose_linears(state))


def with_prefix(state: Mapping[str, Tensor]) -> State:
    """Put "transformer." before every name except the head's."""
    return {
        name if name.startswith("lm_head.") else f"transformer.{name}": tensor
        for name, tensor in state.items()
    }


def count_layers(names: Iterable[str]) -> int:
    """Count the layers in names that contain "h.0." and so on."""
    matches = (re.match(r"h\.(\d+)\.", name) for name in names)
    return len({match[1] for match in matches if match})


def _nanogpt(state: Mapping[str, Tensor]) -> State:
    state = strip(state, "_orig_mod.", "transformer.")
    # safetensors' save_model keeps only one name of a tied matrix
    if "wte.weight" not in state and "lm_head.weight" in state:
        state["wte.weight"] = state["lm_head.weight"]
    weights = [
        name
        for name in state
        if name.startswith(("h.", "ln_f.")) and name.endswith(".weight")
    ]
    biases = [f"{name.removesuffix('weight')}bias" for name in weights]
    # a nanoGPT with bias=False: add biases of 0
    if not any(bias in state for bias in biases):
        for weight, bias in zip(weights, biases, strict=True):
            state[bias] = state[weight].new_zeros(state[weight].size(0))
    return _transpose_linears(state)


def _transpose_linears(state: Mapping[str, Tensor]) -> State:
    return {
        name: tensor.t()
        if name.endswith(LINEAR_WEIGHTS) and tensor.dim() == 2
        else tensor
        for name, tensor in state.items()
    }


def _scratch(state: Mapping[str, Tensor]) -> State:
    renamed = {}
    for name, tensor in strip(state).items():
        for theirs, ours in _SCRATCH_NAMES.items():
            name = re.sub(theirs, ours, name)
        renamed[name] = tensor
    if "wpe.weight" in renamed:
        renamed["wpe.weight"] = renamed["wpe.weight"].squeeze(0)
    for i in range(count_layers(renamed)):
        for kind in ("weight", "bias"):
            names = [
                f"h.{i}.attn.{part}.{kind}"
                for part in ("query", "key", "value")
            ]
            shapes = {tuple(renamed[n].shape) for n in names if n in renamed}
            # parts that cannot be joined keep their names, so that a message
            # shows them
            if len(shapes) == 1 and all(n in renamed for n in names):
                parts = [renamed.pop(n) for n in names]
                renamed[f"h.{i}.attn.c_attn.{kind}"] = torch.cat(parts)
    return _transpose_linears(renamed)
