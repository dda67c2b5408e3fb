"""Find the kind of each step of a walk (a forward pass step by step).

Each kind has a text in files/step_texts.html, and perhaps in a style's STEPS.
A kind is recognised by the shape of the value, masked scores, rows that sum to
one, and the order of steps. Names in the source are not read, so this works
for models that the kit does not know.
"""

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from ..values.rows import Row
from ..values.side import Side

# kinds of values with shape (positions, positions)
SQUARE = {"scores", "mask", "probabilities"}
# by kind of step: its part of the model; a norm belongs to the part after it
GROUPS = {
    kind: group
    for group, kinds in {
        "embedding": ("token", "position", "embedding"),
        "attention": (
            "project", *SQUARE, "mix", "attention", "join",
            "residual_attention",
        ),
        "feed-forward": (
            "widen", "activation", "narrow", "residual_feed_forward",
        ),
        "last norm": ("last_norm",),
        "head": ("logits", "log_probs"),
    }.items()
    for kind in kinds
}  # fmt: skip
_AXES = {
    **dict.fromkeys(SQUARE, ("batch", "heads", "time", "time")),
    "mix": ("batch", "heads", "time", "width of a head"),
    "widen": ("batch", "time", "inner width"),
    "activation": ("batch", "time", "inner width"),
    "logits": ("batch", "time", "vocabulary"),
    "log_probs": ("batch", "time", "vocabulary"),
}
_ACTIVATIONS = {"gelu", "relu", "silu", "tanh", "sigmoid", "mish"}
_NORMS = {"layer_norm", "native_layer_norm", "rms_norm"}
_FUSED = "scaled_dot_product_attention"
_PRODUCTS = {"linear", "addmm", "@", "bmm", "einsum", "split", _FUSED}


def name_axes(kind: str, shape: Sequence[int], time: int) -> str:
    """Return names for the axes of a step's value, "" if unknown."""
    names = _AXES.get(kind, ("batch", "time", "width"))[-len(shape) :]
    named = list(zip(names, shape, strict=False))
    known = kind and len(named) == len(shape) and ("time", time) in named
    return " \u00d7 ".join(names) if known else ""


def name_kinds(
    rows: Sequence[Row], values: Mapping[int, Tensor], side: Side
) -> list[str]:
    """Return the kind of each step that both models have, "" if unknown.

    `values` holds the values of the left model's run, by number.
    """
    flipped = copy(side)
    flipped.tokens, flipped.kept = side.tokens.flip(1), None
    early = [r.order[0] for r in rows if r.layer is None]
    moved = flipped.keep(set(early) & values.keys())
    last = max((r.order[0] for r in rows if r.layer is not None), default=-1)
    layer, stream, width, kinds = None, set[int](), 0, []
    seen = set[str]()  # kinds of earlier steps in this layer
    for row in rows:
        number, value = row.order[0], values[row.order[0]]
        ops = {p.op for p in (row.left, row.right) if p and not p.inside}
        if row.layer != layer:
            layer, seen = row.layer, set()
        adds = bool(ops & {"+", "+="})
        grows = adds and bool(stream.intersection(side.values[number].inputs))
        if row.layer is not None:
            added = "residual_attention" in seen
            if grows:
                half = "feed_forward" if added else "attention"
                kind = f"residual_{half}"
                seen.discard("activation")
            elif ops & _NORMS or _normal(value, width):
                kind = "second_norm" if added else "norm"
            else:
                kind = _in_layer(row, value, ops, seen, width)
        elif number < last:
            still = number in moved and value.equal(moved[number])
            kind = "embedding" if adds else "position" if still else "token"
            if not (adds or ops & {"embedding", "[]"}):
                kind = ""
        else:
            kind = "last_norm" if ops & _NORMS else ""
            if ops & _PRODUCTS:
                kind = "logits"
            elif number == side.normalised:
                kind = "log_probs"
            elif _normal(value, width):
                kind = "last_norm"
        if kind in ("token", "embedding") or grows:
            stream.add(number)
            width = value.size(-1)
        seen.add(kind)
        kinds.append(kind)
    return kinds


def _in_layer(
    row: Row, value: Tensor, ops: set[str], seen: set[str], width: int
) -> str:
    if square := _square(row, value, bool(seen & SQUARE)):
        return square
    if ops & _ACTIVATIONS:
        return "activation"
    if not ops & _PRODUCTS:
        return ""
    attended = seen & {"mix", "attention"}
    if _FUSED in ops or ("probabilities" in seen and not attended):
        return "mix" if seen & SQUARE else "attention"
    if "residual_attention" in seen:
        back = "activation" in seen and value.size(-1) == width
        return "narrow" if back else "widen"
    return "join" if attended else "project"


def _normal(value: Tensor, width: int) -> bool:
    """Return whether the features of each position have a mean square of 1."""
    if value.size(-1) != width:
        return False
    size = value.square().mean(-1)
    # allow 1 / width, because the deviation may be computed with width - 1
    return bool(((size - 1).abs() < 1e-3 + 1 / width).all())


def _square(row: Row, value: Tensor, again: bool) -> str:
    """Return the kind of a value of shape (positions, positions), or ""."""
    ops = {p.op for p in (row.left, row.right) if p}
    steps = {p.inside for p in (row.left, row.right) if p} - {""}
    time = value.size(-1)
    if value.dim() < 2 or value.size(-2) != time or time < 2:
        return ""
    ones = (value.sum(-1) - 1).abs().max() < 1e-3 and value.min() >= 0
    if ones or "probabilities" in steps:
        return "probabilities"
    later = torch.ones(time, time, dtype=torch.bool).triu(1)
    if value[..., later].max() < value[..., ~later].min() - 100:
        return "mask"
    scaled = again and ops & {"*", "/", "*=", "/="}
    products = scaled or ops & {"@", "bmm", "einsum", "baddbmm"}
    return "scores" if products or "scaled scores" in steps else ""
