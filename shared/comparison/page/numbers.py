"""Matrices of numbers, small enough to travel inside a page.

A byte holds a size from 1e-20 to 1e5 in steps of a tenth of a decade, in
base64, row by row.
"""

import base64
import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...invariants import influence

SMALLEST, LARGEST = -20.0, 5.0
# Multiplications that one influence map may cost, and its sides.
EFFORT, SHORTEST, LONGEST = 6e9, 8, 48


def sizes(matrix: Float[Tensor, "*shape"]) -> str:
    """Return |matrix| as bytes of base64: 0 is 0, 255 is NaN or more."""
    size = matrix.detach().cpu().double().abs().nan_to_num(nan=math.inf)
    scale = 254 / (LARGEST - SMALLEST)
    level = 1 + (size.clamp(min=1e-300).log10() - SMALLEST) * scale
    code = torch.where(size == 0, 0.0, level.round().clamp(1, 255))
    return base64.b64encode(code.to(torch.uint8).numpy().tobytes()).decode()


def influence_data(
    models: tuple[Any, Any], tokens: Int[Tensor, "1 time"]
) -> dict:
    """Return the influence maps of both models, and what they leak.

    The larger the model, the fewer of the text's tokens are tried.
    """
    count = sum(p.numel() for p in models[0].parameters())
    side = max(SHORTEST, min(LONGEST, math.isqrt(int(EFFORT) // count)))
    ids = tokens[0, :side]
    maps = [influence(model, ids, rounds=1) for model in models]
    return {
        "time": len(ids),
        "left": sizes(maps[0]),
        "right": sizes(maps[1]),
        "early": [m.triu(1).max().item() for m in maps],
        "largest": [m.max().item() for m in maps],
    }
