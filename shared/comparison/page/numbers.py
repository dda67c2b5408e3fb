"""Matrices of numbers, small enough to travel inside a page.

A byte holds a size from 1e-20 to 1e5 in steps of a tenth of a decade, two
bytes a probability; both in base64, row by row.
"""

import base64
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...invariants import influence
from ...protocol import Style
from ..attention_maps import attention_maps
from ..models import largest_difference

SMALLEST, LARGEST = -20.0, 5.0
# Bytes of all attention maps together; the page stays under 2 MB with them.
BUDGET = 1_000_000
# Multiplications that one influence map may cost, and its sides.
EFFORT, SHORTEST, LONGEST = 6e9, 8, 48


def sizes(matrix: Float[Tensor, "*shape"]) -> str:
    """Return |matrix| as bytes of base64: 0 is 0, 255 is NaN or more."""
    size = matrix.detach().cpu().double().abs().nan_to_num(nan=math.inf)
    scale = 254 / (LARGEST - SMALLEST)
    level = 1 + (size.clamp(min=1e-300).log10() - SMALLEST) * scale
    code = torch.where(size == 0, 0.0, level.round().clamp(1, 255))
    return base64.b64encode(code.to(torch.uint8).numpy().tobytes()).decode()


def probabilities(matrix: Float[Tensor, "*shape"]) -> str:
    """Return probabilities as little-endian pairs of bytes, in base64."""
    code = (matrix.detach().cpu().double().nan_to_num() * 65535).round()
    data = code.clamp(0, 65535).numpy().astype("<u2").tobytes()
    return base64.b64encode(data).decode()


def attention_data(
    styles: tuple[Style, Style], models: tuple, tokens: Int[Tensor, "1 time"]
) -> dict | None:
    """Return the attention maps of both models and their difference.

    Of a long text only the first tokens are run, of a very large model only
    the first layers are kept: as many as the page has room for. None where a
    style shows no maps.
    """
    config = models[0].config
    heads = config.n_layer * config.n_head
    # five bytes a cell, and a third more in base64
    time = min(tokens.size(1), max(16, math.isqrt(BUDGET * 3 // 20 // heads)))
    maps = [
        attention_maps(model, style.STAGES, tokens[:, :time])
        for style, model in zip(styles, models, strict=True)
    ]
    left, right = maps
    if left is None or right is None or left.shape != right.shape:
        return None
    room = BUDGET * 3 // 20 // (time * time * config.n_head)
    left, right = left[: max(1, room)], right[: max(1, room)]
    return {
        "time": time,
        "layers": left.size(0),
        "heads": left.size(1),
        "left": probabilities(left),
        "right": probabilities(right),
        "difference": sizes(left.double() - right.double()),
        "largest": [
            [largest_difference(a, b) for a, b in zip(x, y, strict=True)]
            for x, y in zip(left, right, strict=True)
        ],
    }


def influence_data(models: tuple, tokens: Int[Tensor, "1 time"]) -> dict:
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
