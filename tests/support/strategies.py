"""Hypothesis strategies: small configs, tokens, models of both styles."""

import pytest
import torch
from hypothesis import strategies as st

from gpt_duet import annotated, mingpt_style
from gpt_duet.checkpoint.gpt2_layout import State
from gpt_duet.config import ACTIVATIONS, GPTConfig


def one_in(count, rows):
    """Return rows of a test as parameters, all but one in so many slow."""
    found = []
    for index, row in enumerate(rows):
        if not isinstance(row, type(pytest.param())):
            row = pytest.param(*(row if type(row) is tuple else (row,)))
        if index % count:
            row = pytest.param(
                *row.values, id=row.id, marks=[*row.marks, pytest.mark.slow]
            )
        found.append(row)
    return found


STYLES = {"annotated": annotated, "mingpt_style": mingpt_style}

seeds = st.integers(0, 2**31 - 1)


@st.composite
def configs(draw, min_embd: int = 2, **fixed) -> GPTConfig:
    """A small config; whatever `fixed` names is not drawn."""
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
def token_batches(draw, config: GPTConfig, min_time: int = 1):
    """Ids of any batch and length that the config allows."""
    batch = draw(st.integers(1, 4))
    time = draw(st.integers(min_time, config.block_size))
    return random_tokens(config, batch, time, draw(seeds))


def random_tokens(config, batch, time, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (batch, time)
    return torch.randint(config.vocab_size, size, generator=generator)


def random_state(
    config: GPTConfig, seed: int = 0, dtype=torch.float64, scale: float = 0.5
) -> State:
    """Weights in the GPT-2 layout that are nowhere zero or one.

    A forgotten bias, gain or position would show.
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


def shapes(config: GPTConfig):
    from gpt_duet.checkpoint.gpt2_layout import gpt2_shapes

    head = {
        "lm_head.weight": (config.vocab_size, config.n_embd),
        "lm_head.bias": (config.vocab_size,),
    }
    return gpt2_shapes(config) | ({} if config.tie_weights else head)


def random_model(style, config, seed=0, dtype=torch.float64):
    """A style's model in eval mode, with the weights of `random_state`."""
    return style.from_gpt2(random_state(config, seed, dtype), config).eval()


def changed(state, change):
    """Replace entries of a dict; those that become None are left out."""
    return {k: v for k, v in (state | change).items() if v is not None}
