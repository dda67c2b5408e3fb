"""A model of one style, rebuilt in another."""

from torch import nn

from ..config import GPTConfig
from ..protocol import load_style, style_of


def convert(model: nn.Module, style: str) -> nn.Module:
    """Rebuild a model in another style, through the GPT-2 layout.

    Args:
        model: of any style.
        style: name of the style's package.

    Returns:
        A model with copies of the weights and the same config, in the same
        train or eval mode.

    Raises:
        ValueError: where the model is of no style, or does not fit.
    """
    state = style_of(model).to_gpt2(model)
    config = model.config
    assert isinstance(config, GPTConfig)
    return load_style(style).from_gpt2(state, config).train(model.training)
