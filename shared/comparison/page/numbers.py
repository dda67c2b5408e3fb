"""Matrices of numbers, small enough to travel inside a page.

A byte holds a size from 1e-20 to 1e5 in steps of a tenth of a decade, two
bytes a probability; both in base64, row by row.
"""

import base64
import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...generation import eval_mode
from ...invariants import influence
from ..models import largest_difference
from ..values.insides import attention

SMALLEST, LARGEST = -20.0, 5.0
# Bytes of all attention maps together; the page stays under 2 MB with them.
BUDGET = 1_000_000
CELL = 5 * 4 / 3  # bytes of a probability on both sides and their difference
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


class _SoftmaxWatch(TorchFunctionMode):
    """Collects the attention probabilities of a first row, in order.

    The fused kernel shows none: they are computed from what it is given.
    """

    def __init__(self, time: int):
        super().__init__()
        self.shape = (time, time)
        self.found: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = seen = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            seen = dict(attention(*args, **kwargs))["probabilities"]
        elif name != "softmax":
            return result
        if seen.shape[-2:] == self.shape:
            self.found.append(seen[0].reshape(-1, *self.shape))
        return result


def attention_maps(
    model: Any, tokens: Int[Tensor, "batch time"]
) -> Float[Tensor, "layer head time time"] | None:
    """Run a model and return the attention probabilities of its first row.

    Nothing is asked of the model: its calls of torch's softmax and of the
    fused kernel are watched. None where there is not one for each head.
    """
    time, config = tokens.size(1), model.config
    with eval_mode(model), torch.no_grad(), _SoftmaxWatch(time) as watch:
        model.log_probs(tokens[:1])
    if sum(map(len, watch.found)) != config.n_layer * config.n_head:
        return None
    return torch.cat(watch.found).view(-1, config.n_head, time, time)


def attention_data(
    models: tuple[Any, Any], tokens: Int[Tensor, "1 time"]
) -> dict | None:
    """Return the attention maps of both models and their difference.

    Of a long text only the first tokens are run, of a very large model only
    the first layers are kept: as many as the page has room for. None where a
    style shows no maps.
    """
    config = models[0].config
    cells = BUDGET / CELL / config.n_head
    time = min(tokens.size(1), max(16, int((cells / config.n_layer) ** 0.5)))
    left, right = (attention_maps(model, tokens[:, :time]) for model in models)
    if left is None or right is None:
        return None
    layers = max(1, int(cells / time**2))
    left, right = left[:layers], right[:layers]
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
