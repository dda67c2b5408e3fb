"""Hypothesis strategies: small configs, tokens, models of both styles.

For example:

    @given(data=st.data())
    def test_scores_have_the_shape_of_the_tokens(data):
        config = data.draw(configs(block_size=8))
        tokens = data.draw(token_batches(config))
        model = data.draw(models(config))
        assert model.log_probs(tokens).shape[:2] == tokens.shape
"""

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "gpt_duet.testing.strategies needs hypothesis: "
        'pip install "gpt-duet[testing]"',
        name=error.name,
    ) from None

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from ..checkpoint.gpt2_layout import State, gpt2_shapes
from ..config import ACTIVATIONS, GPTConfig
from ..names import STYLES
from ..protocol import LanguageModel, Style, load_style

__all__ = [
    "configs",
    "models",
    "random_model",
    "random_state",
    "random_tokens",
    "seeds",
    "shapes",
    "token_batches",
]

seeds = st.integers(0, 2**31 - 1)


@st.composite
def configs(
    draw: Callable[..., Any], min_embd: int = 2, **fixed: Any
) -> GPTConfig:
    """Draw a small config: at most 3 layers and 40 ids.

    Args:
        draw: do not pass it, because hypothesis does.
        min_embd: the least width.
        **fixed: fields that are not drawn.
    """
    n_head = draw(st.integers(1, 4))
    least = -(-min_embd // n_head)
    fields = {
        "vocab_size": draw(st.integers(1, 40)),
        "block_size": draw(st.integers(1, 20)),
        "n_layer": draw(st.integers(1, 3)),
        "n_head": n_head,
        "n_embd": n_head * draw(st.integers(least, least + 6)),
        "n_inner": draw(st.none() | st.integers(1, 30)),
        "dropout": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "activation": draw(st.sampled_from(sorted(ACTIVATIONS))),
        "tie_weights": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([None, 0.0, 1e-5])),
    }
    return GPTConfig(**fields | fixed)


@st.composite
def token_batches(
    draw: Callable[..., Any], config: GPTConfig, min_time: int = 1
) -> Int[Tensor, "batch time"]:
    """Draw up to four rows of ids, of any length that the config allows."""
    batch = draw(st.integers(1, 4))
    time = draw(st.integers(min_time, config.block_size))
    return random_tokens(config, batch, time, draw(seeds))


@st.composite
def models(draw: Callable[..., Any], config: GPTConfig) -> LanguageModel:
    """Draw a model of either style in eval mode, with random weights."""
    style = load_style(draw(st.sampled_from(STYLES)))
    return random_model(style, config, draw(seeds))


def random_tokens(
    config: GPTConfig, batch: int, time: int, seed: int = 0
) -> Int[Tensor, "batch time"]:
    """Return ids of the config's vocabulary; equal seeds give equal ids."""
    generator = torch.Generator().manual_seed(seed)
    size = (batch, time)
    return torch.randint(config.vocab_size, size, generator=generator)


def random_state(
    config: GPTConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    scale: float = 0.5,
) -> State:
    """Return weights in the GPT-2 layout that are nowhere zero or one.

    With such weights, a forgotten bias, gain or position changes the scores.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: scale * torch.randn(shape, generator=generator, dtype=dtype)
        for name, shape in shapes(config).items()
    }
    for name, tensor in state.items():
        if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")):
            tensor += 1
    return state


def random_model(
    style: Style,
    config: GPTConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> LanguageModel:
    """Return a style's model in eval mode with weights of `random_state`."""
    model = style.from_gpt2(random_state(config, seed, dtype), config)
    return cast(LanguageModel, model.eval())


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, with the head's if it is untied."""
    head = {
        "lm_head.weight": (config.vocab_size, config.n_embd),
        "lm_head.bias": (config.vocab_size,),
    }
    return gpt2_shapes(config) | ({} if config.tie_weights else head)
