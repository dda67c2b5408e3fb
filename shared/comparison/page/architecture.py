"""The architecture of two styles, from the tokens to the log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...protocol import Style
from ..models import stage_modules, stage_outputs


@dataclass(frozen=True)
class Part:
    """A concept in both styles, and the shape of what comes out of it.

    Attributes:
        concept: its name.
        title: what stands at the top.
        names: for each style what implements it.
        shape: of its output; "" for the block, whose parts follow it.
        difference: largest difference of both outputs, where measured.
        inside: whether it is a part of the block.
    """

    concept: str
    title: str
    names: tuple[list[str], list[str]]
    shape: str
    difference: float | None
    inside: bool = False


def architecture(
    styles: tuple[Style, Style],
    models: tuple[Any, Any],
    tokens: Tensor,
    differences: Mapping[str, float],
) -> list[Part]:
    """Return the parts in the order of the data flow.

    The shapes are those of a run on the tokens.
    """
    outputs = stage_outputs(models[0], styles[0].STAGES, tokens)
    features = str(tuple(next(iter(outputs.values())).shape))
    scores = str(tuple(outputs["log_probs"].shape))
    layers = models[0].config.n_layer
    left, right = (
        {c: list(map(_name, parts)) for c, parts in style.COMPONENTS.items()}
        | {"model": [type(n).__name__ for n in _last_norm(model, style)]}
        for style, model in zip(styles, models, strict=True)
    )
    return [
        Part(
            concept,
            title,
            (left.get(concept, []), right.get(concept, [])),
            shape,
            differences.get(concept),
            inside=concept in ("attention", "feed_forward"),
        )
        for concept, title, shape in (
            ("embedding", "embedding", features),
            ("block", f"block \u00d7 {layers}", ""),
            ("attention", "attention", features),
            ("feed_forward", "feed-forward", features),
            ("model", "last norm", features),
            ("head", "head", scores),
        )
    ]


def _name(component: Any) -> str:
    return getattr(component, "__qualname__", type(component).__name__)


def _last_norm(model: Any, style: Style) -> list[Any]:
    return stage_modules(model, style.STAGES, "final_norm")
