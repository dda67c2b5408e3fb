"""Rebuild a model of one style in another style."""

import warnings

from torch import nn

from ..config import GPTConfig
from ..names import short_name
from ..protocol import load_style, style_of
from .gpt2_layout import State, require_tied


def convert(model: nn.Module, style: str) -> nn.Module:
    """Rebuild a model in another style, through the GPT-2 layout.

    Args:
        model: a model of any style.
        style: name of the new style's package.

    Returns:
        A model with the weights and the config that `in_gpt2_layout` returns.
        It is in train mode if the given model is, else in eval mode.

    Raises:
        ValueError: if the model belongs to no style, or its weights do not
            fit.
    """
    state, config = in_gpt2_layout(model)
    return load_style(style).from_gpt2(state, config).train(model.training)


def in_gpt2_layout(model: nn.Module) -> tuple[State, GPTConfig]:
    """Return copies of a model's weights in the GPT-2 layout, and its config.

    tie_weights becomes False if the head and the token table differ. A warning
    names the parts that other styles compute differently.

    Raises:
        ValueError: if the model belongs to no style, or its weights do not
            fit.
    """
    style = style_of(model)
    state = style.to_gpt2(model)
    given = model.config
    assert isinstance(given, GPTConfig)
    config: GPTConfig = given
    if config.tie_weights and "lm_head.weight" in state:
        try:
            require_tied(state)
        except ValueError:  # a style that cannot tie trains two matrices
            config = config.replace(tie_weights=False)
    used = {type(module) for module in model.modules()}
    notes = getattr(style, "ORIGINAL_PARTS_NOTES", {})
    parts = [
        f"{short_name(style.__name__)}.{part.__name__} "
        f"({notes.get(name, 'its own')})"
        for name, part in getattr(style, "ORIGINAL_PARTS", {}).items()
        if part in used
    ]
    if config.norm_eps != 0 and parts:
        warnings.warn(
            f"the GPT-2 layout cannot store {' and '.join(parts)}: a model "
            "that is loaded from it is close to this one, but not the same",
            stacklevel=1,
        )
    return state, config
