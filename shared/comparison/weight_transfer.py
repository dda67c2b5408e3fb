"""How both styles take over a GPT-2 checkpoint's weights, part by part.

Each part is measured alone: on weights with which the rest of the model is
the same in both styles to the last bit, so that what differs is its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..checkpoint.gpt2_layout import read_gpt2
from ..config import GPTConfig
from ..protocol import Style
from .models import largest_difference, stage_outputs

# What is set to zero to measure a part alone: the token table, whose scale
# rounds, and what the blocks add to the residual stream.
TOKENS = ("wte.weight",)
BLOCKS = ("c_proj.weight", "c_proj.bias")
BOTH = (*TOKENS, *BLOCKS)


@dataclass(frozen=True)
class TransferRow:
    """One part of the model, and what taking over its weights costs."""

    name: str  # the common term
    # how each style writes it, "" where it does not say
    written: tuple[str, str]
    # how each style takes over a GPT-2 checkpoint's
    transferred: tuple[str, str]
    # largest absolute difference that is the part's own; NaN where a style has
    # no such stage
    error: float
    where: str  # what was compared
    absorbed: bool  # False where the error is no rounding but mathematics


def measure_weight_transfer(
    styles: tuple[Style, Style],
    state: Mapping[str, Tensor],
    config: GPTConfig,
    tokens: Int[Tensor, "batch time"],
) -> list[TransferRow]:
    """Measure every part on the first block of a model."""
    state = {
        name: tensor
        for name, tensor in read_gpt2(state, config).items()
        if not name.startswith("h.") or name.startswith("h.0.")
    }
    config = replace(config, n_layer=1, tie_weights=False)
    other = "gelu_tanh" if config.activation == "relu" else "relu"
    bent = replace(config, activation=other)
    exact = replace(config, norm_eps=0.0)
    tied = replace(config, tie_weights=True)
    rows = []
    for name, stage, zeroed, configs, where in (
        ("token table", "embedding", ("wpe.weight",), (config, config),
         "in the embedding, with a position table of zeros"),
        ("position table", "embedding", TOKENS, (config, config),
         "in the embedding, with a token table of zeros"),
        ("attention's matrices", "block.0.attention", TOKENS, (config, config),
         "in the first attention, on equal inputs"),
        ("norm", "final_norm", BOTH, (exact, exact),
         "in the last norm, computed by each style's own class with eps 0"),
        ("head", "log_probs", BOTH, (config, config),
         "in the log-probabilities, on equal inputs"),
        ("tied head", "log_probs", BLOCKS, (tied, tied),
         "in the log-probabilities, from a checkpoint without lm_head.weight"),
        ("activation", "log_probs", (), (config, bent),
         f"in the log-probabilities, between {config.activation} and {other}"),
    ):  # fmt: skip
        weights = {
            key: torch.zeros_like(tensor) if key.endswith(zeroed) else tensor
            for key, tensor in state.items()
            if name != "tied head" or not key.startswith("lm_head")
        }
        outputs, words = [], []
        for style, own_config in zip(styles, configs, strict=True):
            build: Any = style.from_gpt2
            parts = getattr(style, "ORIGINAL_PARTS", {})
            model = build(
                weights, own_config, **parts if name == "norm" else {}
            )
            found = stage_outputs(model, style.STAGES, tokens)
            outputs.append(found.get(stage, torch.tensor(torch.nan)))
            says = getattr(style, "WEIGHT_TRANSFER", {})
            words.append(says.get(name, ("", "")))
        written, transferred = zip(*words, strict=True)
        error = largest_difference(*outputs)
        absorbed = name != "activation"
        rows.append(
            TransferRow(name, written, transferred, error, where, absorbed)
        )
    return rows
