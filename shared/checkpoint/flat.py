"""The flat layout: a line of sizes, then float32 numbers in a fixed order.

A program in any language can read the file: it scans one line and reads one
array. Each kind of array is written once, with all layers joined. A linear
weight is (out, in): one row computes one output. A tied head is also written.
"""

import json
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..config import GPTConfig
from .gpt2_layout import LINEAR_WEIGHTS

WORD = "gpt-duet-flat"  # the first word of the line of sizes
NUMBERS, INDEX = "model.bin", "model.json"
BLOCK = (
    *("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias"),
    *("attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias"),
    *("mlp.c_fc.weight", "mlp.c_fc.bias"),
    *("mlp.c_proj.weight", "mlp.c_proj.bias"),
)
ORDER = (
    *("wte.weight", "wpe.weight", *(f"h.*.{name}" for name in BLOCK)),
    *("ln_f.weight", "ln_f.bias", "lm_head.weight"),
)
DEFAULT_EPS = 1e-5


def flat_file(
    state: Mapping[str, Tensor], config: GPTConfig
) -> tuple[bytes, str]:
    """Return the file of numbers, and its index as JSON.

    Args:
        state: weights in the GPT-2 layout, with lm_head.weight.
        config: config of the model with these weights.
    """
    eps = DEFAULT_EPS if config.norm_eps is None else config.norm_eps
    sizes = (
        *(config.vocab_size, config.block_size, config.n_layer),
        *(config.n_head, config.n_embd, config.inner_size),
    )
    line = f"{WORD} {' '.join(map(str, sizes))} {config.activation} {eps:g}\n"
    parts, offset = [line.encode()], len(line)
    index: dict[str, dict[str, object]] = {}
    for name in ORDER:
        array = _array(state, name, config.n_layer)
        index[name] = {"shape": list(array.shape), "offset": offset}
        offset += 4 * math.prod(array.shape)
        parts.append(array.tobytes())
    content = {"header": line.strip(), "dtype": "float32", "arrays": index}
    return b"".join(parts), json.dumps(content, indent=1) + "\n"


def _array(state: Mapping[str, Tensor], name: str, layers: int) -> np.ndarray:
    """Return an array of all layers joined, or of a part outside layers."""
    numbered = "*" in name
    names = [name.replace("*", str(i)) for i in range(layers)]
    found = [state[n].float() for n in names[: layers if numbered else 1]]
    if name.endswith(LINEAR_WEIGHTS):
        found = [tensor.t() for tensor in found]
    tensor = torch.stack(found) if numbered else found[0]
    return np.ascontiguousarray(tensor.cpu().numpy(), "<f4")
