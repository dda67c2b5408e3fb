"""Two styles from one set of weights, and the verdict."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..config import GPTConfig
from ..protocol import Style, load_style
from .models import (
    compare_models,
    count_parameters,
    largest_difference,
    median_times,
    rounding_error,
)


@dataclass(frozen=True)
class Comparison:
    """What comparing two styles found.

    Attributes:
        styles: names of the two.
        config: what both were built from.
        weights: where the weights come from, in words.
        dtype: "float32" or "float64".
        device: where both ran.
        differences: largest absolute difference at each stage.
        bound: largest difference of log-probabilities that rounding
            explains.
        parameters: number of parameters by component, for each style.
        next_tokens: for each style the likeliest next ids with their
            probabilities.
        seconds: median time of one forward pass, for each style.
        schools_own: for each school's own part its name, how far it moves
            the log-probabilities, and why.
    """

    styles: tuple[str, str]
    config: GPTConfig
    weights: str
    dtype: str
    device: str
    differences: dict[str, float]
    bound: float
    parameters: tuple[dict[str, int], dict[str, int]]
    next_tokens: tuple[list[tuple[int, float]], list[tuple[int, float]]]
    seconds: tuple[float, float]
    schools_own: list[tuple[str, float, str]]

    @property
    def largest(self) -> float:
        """Largest difference in log-probabilities."""
        return self.differences["log_probs"]

    @property
    def one_function(self) -> bool:
        """Whether rounding explains the difference; NaN is explained by none.

        All log-probabilities are compared: every position, every token.
        """
        return self.largest <= self.bound

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        count = "one function" if self.one_function else "two functions"
        return (
            f"{count}: largest difference {self.largest:.2g} in "
            f"log-probabilities (bound {self.bound:.2g})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self) | {
            "one_function": self.one_function,
            "verdict": self.verdict,
        }


def compare_styles(
    names: tuple[str, str],
    config: GPTConfig,
    tokens: Int[Tensor, "batch time"],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    top: int = 5,
) -> Comparison:
    """Build both styles from one set of weights and compare them.

    The second style draws the weights. Its biases and norms start at zero
    and one, where a forgotten one would not show: they are shaken.

    Args:
        names: packages of the two styles; the second is the reference for
            what rounding explains.
        config: what to build.
        tokens: ids to run, on the device to run on.
        dtype: torch.float32 or torch.float64.
        seed: of the weights.
        top: how many likeliest next tokens to keep.

    Raises:
        ValueError: for an unknown style or too many tokens.
    """
    state, told = random_weights(names[1], config, seed)
    return compare_weights(
        names,
        config,
        {k: v.to(tokens.device, dtype) for k, v in state.items()},
        tokens,
        weights=told,
        top=top,
    )


def random_weights(
    name: str, config: GPTConfig, seed: int
) -> tuple[dict[str, Tensor], str]:
    """Draw a style's fresh weights, shaken, and say so in words."""
    state = enlarged_random_weights(load_style(name), config, seed)
    return state, f"{name}.build_model, seed {seed}, shaken"


def enlarged_random_weights(
    style: Style, config: GPTConfig, seed: int
) -> dict[str, Tensor]:
    """Draw a style's fresh weights, then shake them.

    Fresh biases are zero and fresh norms one, where a forgotten one would
    not show; fresh matrices are so small that every nonlinearity is nearly
    linear. So vectors are moved and matrices made four times as large.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = style.to_gpt2(style.build_model(config))
        if config.tie_weights:  # a style that never ties drew two matrices
            state.pop("lm_head.weight", None)
            state.pop("lm_head.bias", None)
        for tensor in state.values():
            if tensor.dim() == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            else:
                tensor *= 4
    return state


def compare_weights(
    names: tuple[str, str],
    config: GPTConfig,
    state: Mapping[str, Tensor],
    tokens: Int[Tensor, "batch time"],
    *,
    weights: str,
    top: int = 5,
) -> Comparison:
    """Compare two styles on given weights in the GPT-2 layout.

    Args:
        names: packages of the two styles.
        config: what the weights do not show.
        state: the weights; their dtype and device are used.
        tokens: ids, on the same device.
        weights: where the weights come from, in words.
        top: how many likeliest next tokens to keep.
    """
    left, right = (load_style(name) for name in names)
    a = left.from_gpt2(state, config).eval()
    b = right.from_gpt2(state, config).eval()
    dtype = next(b.parameters()).dtype
    ours, theirs = median_times([a, b], tokens)
    return Comparison(
        styles=names,
        config=config,
        weights=weights,
        dtype=str(dtype).removeprefix("torch."),
        device=str(tokens.device),
        differences=compare_models(a, b, (left.STAGES, right.STAGES), tokens),
        bound=rounding_bound(b, tokens),
        parameters=(
            count_parameters(a, left.STAGES),
            count_parameters(b, right.STAGES),
        ),
        next_tokens=(_likeliest(a, tokens, top), _likeliest(b, tokens, top)),
        seconds=(ours, theirs),
        schools_own=[
            _measure_own(style, state, config, other, tokens)
            for style, other in ((left, b), (right, a))
            if getattr(style, "ORIGINAL_PARTS", None)
        ],
    )


def rounding_bound(model: Any, tokens: Int[Tensor, "batch time"]) -> float:
    """Return the difference in log-probabilities that rounding explains.

    In float64 1e-12. Below it, twice the model's own error against its
    float64 copy, once for each of two models, plus 1e-6.
    """
    if next(model.parameters()).dtype == torch.float64:
        return 1e-12
    return 2 * rounding_error(model, tokens) + 1e-6


def _likeliest(
    model: Any, tokens: Int[Tensor, "batch time"], top: int
) -> list[tuple[int, float]]:
    with torch.inference_mode():
        probs = model.log_probs(tokens)[0, -1].double().exp()
    best = probs.topk(min(top, len(probs)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _measure_own(
    style: Any,
    state: Mapping[str, Tensor],
    config: GPTConfig,
    other: Any,
    tokens: Int[Tensor, "batch time"],
) -> tuple[str, float, str]:
    """How far the school's own parts move a style from the other."""
    own = style.from_gpt2(state, config, **style.ORIGINAL_PARTS).eval()
    with torch.inference_mode():
        moved = largest_difference(
            own.log_probs(tokens), other.log_probs(tokens)
        )
    parts = style.ORIGINAL_PARTS.values()
    names = " and ".join(f"{style.__name__}.{p.__name__}" for p in parts)
    why = " ".join((inspect.getdoc(p) or "").split("\n")[0] for p in parts)
    return names, moved, why
