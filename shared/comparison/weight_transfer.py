"""How both styles take over a GPT-2 checkpoint's weights, part by part.

Each part is measured alone: on weights with which the rest of the model is
the same in both styles to the last bit, so that what differs is its own.
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

# What is set to zero to measure a part alone: the token table, whose scale
# rounds, and what the blocks add to the residual stream.
TOKENS = ("wte.weight",)
BLOCKS = (
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
)


@dataclass(frozen=True)
class TransferRow:
    """One part of the model, and what taking over its weights costs.

    Attributes:
        name: the common term.
        written: how each style writes it, "" where it does not say.
        transferred: how each style takes over a GPT-2 checkpoint's.
        error: largest absolute difference that is the part's own.
        where: what was compared.
        absorbed: False where the error is no rounding but mathematics.
    """

    name: str
    written: tuple[str, str]
    transferred: tuple[str, str]
    error: float
    where: str
    absorbed: bool = True


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
    exact = replace(config, norm_eps=0.0)
    bent = config, replace(config, activation=other)

    def difference(
        stage: str,
        zeroed: tuple[str, ...] = (),
        configs: tuple[GPTConfig, GPTConfig] = (config, config),
        own: bool = False,
    ) -> float:
        """Largest difference at a stage; with `own`, of their own parts."""
        weights = {
            name: torch.zeros_like(t) if name.endswith(zeroed) else t
            for name, t in state.items()
        }
        outputs = []
        for style, config in zip(styles, configs, strict=True):
            build: Callable = style.from_gpt2
            parts = getattr(style, "ORIGINAL_PARTS", {}) if own else {}
            model = build(weights, config, **parts)
            found = stage_outputs(model, style.STAGES, tokens)
            if stage not in found:
                return float("nan")
            outputs.append(found[stage])
        return largest_difference(*outputs)

    everything = (*TOKENS, *BLOCKS)
    norm = difference("final_norm", everything, (exact, exact), own=True)
    bent_apart = difference("log_probs", configs=bent)
    words = [getattr(style, "WEIGHT_TRANSFER", {}) for style in styles]
    rows = []
    for name, error, where in (
        ("token table", difference("embedding", ("wpe.weight",)),
         "the embedding, positions zero"),
        ("position table", difference("embedding", TOKENS),
         "the embedding, tokens zero"),
        ("projections", difference("block.0.attention", TOKENS),
         "the first attention, on equal input"),
        ("norm", norm, "the last norm, each style's own, eps 0"),
        ("head", difference("log_probs", everything),
         "the log-probabilities, on equal input"),
        ("tied head", _tied_difference(styles, state, config),
         "the matrices, as read"),
        ("activation", bent_apart,
         f"the log-probabilities, {config.activation} on the left and "
         f"{other} on the right"),
    ):  # fmt: skip
        left, right = (w.get(name, ("", "")) for w in words)
        written, taken = (left[0], right[0]), (left[1], right[1])
        absorbed = name != "activation"
        rows.append(TransferRow(name, written, taken, error, where, absorbed))
    return rows


def _tied_difference(
    styles: tuple[Style, Style], state: State, config: GPTConfig
) -> float:
    """Largest difference of the heads that are read from a tied file."""
    without = {k: v for k, v in state.items() if not k.startswith("lm_head")}
    tied = replace(config, tie_weights=True)
    heads = []
    for style in styles:
        written = style.to_gpt2(style.from_gpt2(without, tied))
        heads.append(read_gpt2(written, tied)["lm_head.weight"])
    return largest_difference(*heads)
