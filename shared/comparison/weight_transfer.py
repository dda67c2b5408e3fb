"""How weights carry over from one style to the other, row by row, measured.

Each row is measured by itself: weights are made in which every other part
of the model is the same in both styles to the last bit, and what is left of
the difference is the row's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ..checkpoint.gpt2_layout import State, read_gpt2
from ..config import GPTConfig
from ..protocol import Style
from .models import largest_difference, stage_outputs

# What a row's weights leave out, so that no other row is in the difference:
# the tokens, whose scale rounds, and what the blocks add to the stream.
TOKENS = ("wte.weight",)
BLOCKS = (
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
)


@dataclass(frozen=True)
class TransferRow:
    """One difference between the styles, and what carrying it over costs.

    Attributes:
        name: the common term.
        written: how each style writes it, "" where it does not say.
        carried: how each style takes over a GPT-2 checkpoint's.
        error: largest absolute difference that is the row's own.
        where: what was compared.
        absorbed: False where the error is no rounding but mathematics.
    """

    name: str
    written: tuple[str, str]
    carried: tuple[str, str]
    error: float
    where: str
    absorbed: bool = True


def measure_weight_transfer(
    styles: tuple[Style, Style],
    state: Mapping[str, Tensor],
    config: GPTConfig,
    tokens: Int[Tensor, "batch time"],
) -> list[TransferRow]:
    """Measure every row on the first block of a model.

    Args:
        styles: the two.
        state: weights in the GPT-2 layout.
        config: their config.
        tokens: ids, on the weights' device.
    """
    state = _first_block(read_gpt2(state, config))
    config = replace(config, n_layer=1, tie_weights=False)

    def apart(stage: str, weights: State, cfg: GPTConfig = config) -> float:
        return _difference_at(
            styles, (weights, weights), (cfg, cfg), tokens, stage
        )

    alone = _zero(state, *TOKENS, *BLOCKS)
    exact = replace(config, norm_eps=0.0)
    bent = {"relu": "gelu_tanh"}.get(config.activation, "relu")
    errors: dict[str, tuple[float, str]] = {
        "token table": (
            apart("embedding", _zero(state, "wpe.weight")),
            "the embedding, positions zero",
        ),
        "position table": (
            apart("embedding", _zero(state, "wte.weight")),
            "the embedding, tokens zero",
        ),
        "projections": (
            apart("block.0.attention", _zero(state, *TOKENS)),
            "the first attention, on equal input",
        ),
        "norm": (
            _difference_at(
                styles, (alone, alone), (exact, exact), tokens, "final_norm",
                own=True,
            ),
            "the last norm, each school's own, eps 0",
        ),
        "head": (
            apart("log_probs", alone),
            "the log-probabilities, on equal input",
        ),
        "tied head": (_tied(styles, state, config), "the matrices, as read"),
        "activation": (
            _difference_at(
                styles, (state, state),
                (config, replace(config, activation=bent)),
                tokens, "log_probs",
            ),
            f"the log-probabilities, {config.activation} on the left and "
            f"{bent} on the right",
        ),
    }  # fmt: skip
    words = [getattr(style, "WEIGHT_TRANSFER", {}) for style in styles]
    rows = []
    for name, (error, where) in errors.items():
        left, right = (w.get(name, ("", "")) for w in words)
        rows.append(
            TransferRow(
                name,
                (left[0], right[0]),
                (left[1], right[1]),
                error,
                where,
                absorbed=name != "activation",
            )
        )
    return rows


def _first_block(state: State) -> State:
    return {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith("h.") or name.startswith("h.0.")
    }


def _zero(state: State, *endings: str) -> State:
    return {
        name: torch.zeros_like(tensor) if name.endswith(endings) else tensor
        for name, tensor in state.items()
    }


def _difference_at(
    styles: tuple[Style, Style],
    states: tuple[State, State],
    configs: tuple[GPTConfig, GPTConfig],
    tokens: Tensor,
    stage: str,
    own: bool = False,
) -> float:
    """Largest difference at one stage of two models."""
    outputs = []
    for style, state, config in zip(styles, states, configs, strict=True):
        build: Callable = style.from_gpt2
        parts = getattr(style, "ORIGINAL_PARTS", {}) if own else {}
        model = build(state, config, **parts)
        found = stage_outputs(model, style.STAGES, tokens)
        if stage not in found:
            return float("nan")
        outputs.append(found[stage])
    return largest_difference(*outputs)


def _tied(
    styles: tuple[Style, Style], state: State, config: GPTConfig
) -> float:
    """How far the heads are apart that two styles read from a tied file."""
    without = {k: v for k, v in state.items() if not k.startswith("lm_head")}
    tied = replace(config, tie_weights=True)
    heads = []
    for style in styles:
        written = style.to_gpt2(style.from_gpt2(without, tied))
        heads.append(read_gpt2(written, tied)["lm_head.weight"])
    return largest_difference(*heads)
