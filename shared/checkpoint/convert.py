"""A model of one style, rebuilt in another."""

from torch import nn

from ..config import GPTConfig
from ..protocol import load_style, style_of
from .gpt2_layout import require_tied


def convert(model: nn.Module, style: str) -> nn.Module:
    """Rebuild a model in another style, through the GPT-2 layout.

    Args:
        model: of any style.
        style: name of the style's package.

    Returns:
        A model with copies of the weights and the same config, in the same
        train or eval mode; tie_weights becomes False where the head is not
        the token table.

    Raises:
        ValueError: where the model is of no style, or does not fit.
    """
    state = style_of(model).to_gpt2(model)
    given = model.config
    assert isinstance(given, GPTConfig)
    config: GPTConfig = given
    if config.tie_weights and "lm_head.weight" in state:
        try:
            require_tied(state)
        except ValueError:  # trained apart, in a style that never ties
            config = config.replace(tie_weights=False)
    return load_style(style).from_gpt2(state, config).train(model.training)
