"""The architecture of two styles, from the tokens to the log-probabilities."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...protocol import Style
from ..models import stage_modules, stage_outputs


def architecture(
    styles: tuple[Style, Style],
    models: tuple[Any, Any],
    tokens: Tensor,
    differences: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return the parts in the order of the data flow.

    For each its concept and title, the names of what implements it in both
    styles, the shape of its output on the tokens ("" for the block, whose
    parts follow it), the largest difference of both outputs, where measured,
    and whether it is inside the block.
    """
    outputs = stage_outputs(models[0], styles[0].STAGES, tokens)
    features = str(tuple(next(iter(outputs.values())).shape))
    scores = str(tuple(outputs["log_probs"].shape))
    layers = models[0].config.n_layer
    parts = []
    for concept, title, shape in (
        ("embedding", "embedding", features),
        ("block", f"block \u00d7 {layers}", ""),
        ("attention", "attention", features),
        ("feed_forward", "feed-forward", features),
        ("model", "last norm", features),
        ("head", "head", scores),
    ):
        names = []
        for style, model in zip(styles, models, strict=True):
            found = style.COMPONENTS.get(concept, ())
            if concept == "model":
                norms = stage_modules(model, style.STAGES, "final_norm")
                found = tuple(map(type, norms))
            names.append([getattr(c, "__qualname__", repr(c)) for c in found])
        parts.append(
            {
                "concept": concept,
                "title": title,
                "names": names,
                "shape": shape,
                "difference": differences.get(concept),
                "inside": concept in ("attention", "feed_forward"),
            }
        )
    return parts
