"""Two styles from one set of weights, and the verdict."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..config import GPTConfig
from ..invariants.model.threads import few_threads
from ..names import short_name
from ..protocol import Style, load_style
from .models import (
    compare_models,
    count_parameters,
    forward_times,
    largest_difference,
)
from .timing import Quartiles

LIKELIEST = 5  # next tokens that are shown


@dataclass(frozen=True)
class Comparison:
    """What comparing two styles found."""

    styles: tuple[str, str]  # names of the two
    config: GPTConfig  # what both were built from
    weights: str  # where the weights come from, in words
    dtype: str  # "float32" or "float64"
    device: str  # where both ran
    differences: dict[str, float]  # largest absolute difference at each stage
    # largest difference of log-probabilities that rounding explains
    bound: float
    # number of parameters by component, for each style
    parameters: tuple[dict[str, int], dict[str, int]]
    # for each style the likeliest next ids with their probabilities
    next_tokens: tuple[list[tuple[int, float]], list[tuple[int, float]]]
    # of one forward pass, for each style: first quartile, median and third
    # quartile
    seconds: tuple[Quartiles, Quartiles]
    threads: int  # with how many it was timed
    # for each part that a style has of its own, and did not run with, how far
    # it would be from the other style, in words
    original_parts: list[str]

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


def enlarged_random_weights(
    style: Style, config: GPTConfig, seed: int
) -> dict[str, Tensor]:
    """Draw a style's fresh weights, and make all of them matter.

    A fresh model hides mistakes. Its biases are zero and its norms' gains
    one, where a forgotten one does not show, and its matrices are so small
    that every nonlinearity is nearly linear. So noise is added to vectors,
    and matrices are made four times as large.
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
    threads: int | None = None,
) -> Comparison:
    """Build both styles from one set of weights and compare them.

    Args:
        names: packages of the two styles; the second is the reference for
            what rounding explains.
        config: what to build.
        state: the weights in the GPT-2 layout; their dtype is used.
        tokens: ids to run, on the device of the weights.
        weights: in words where they come from.
        threads: None: small models are timed on one.

    Raises:
        ValueError: for an unknown style or too many tokens.
    """
    left, right = (load_style(name) for name in names)
    a = left.from_gpt2(state, config).eval()
    b = right.from_gpt2(state, config).eval()
    dtype = next(b.parameters()).dtype
    size = sum(p.numel() for p in b.parameters())
    with few_threads(size, tokens.numel(), threads) as threads:
        ours, theirs = forward_times([a, b], tokens)
        return Comparison(
            styles=names,
            config=config,
            weights=weights,
            dtype=str(dtype).removeprefix("torch."),
            device=str(tokens.device),
            differences=compare_models(
                a, b, (left.STAGES, right.STAGES), tokens
            ),
            bound=rounding_bound(b, tokens),
            parameters=(
                count_parameters(a, left.STAGES),
                count_parameters(b, right.STAGES),
            ),
            next_tokens=(_likeliest(a, tokens), _likeliest(b, tokens)),
            seconds=(ours, theirs),
            threads=threads,
            original_parts=[
                *_original_parts(left, state, config, tokens, b),
                *_original_parts(right, state, config, tokens, a),
            ],
        )


def rounding_bound(model: Any, tokens: Int[Tensor, "batch time"]) -> float:
    """Return the difference in log-probabilities that rounding explains.

    In float64 1e-12. Below it, twice the model's own error against its
    float64 copy, once for each of two models, plus 1e-6. That copy runs on
    the CPU, where float64 is always to be had.
    """
    if next(model.parameters()).dtype == torch.float64:
        return 1e-12
    model = copy.deepcopy(model).eval()
    exact = copy.deepcopy(model).to("cpu", torch.float64)
    with torch.inference_mode():
        error = largest_difference(
            model.log_probs(tokens), exact.log_probs(tokens.cpu())
        )
    return 2 * error + 1e-6


def _likeliest(
    model: Any, tokens: Int[Tensor, "batch time"]
) -> list[tuple[int, float]]:
    with torch.inference_mode():
        probs = model.log_probs(tokens)[0, -1].double().exp()
    best = probs.topk(min(LIKELIEST, len(probs)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _original_parts(
    style: Any,
    state: Mapping[str, Tensor],
    config: GPTConfig,
    tokens: Int[Tensor, "batch time"],
    other: Any,
) -> Iterator[str]:
    """Build a style with each part of its own, and compare."""
    notes = getattr(style, "ORIGINAL_PARTS_NOTES", {})
    arguments = inspect.signature(style.from_gpt2).parameters
    for argument, part in getattr(style, "ORIGINAL_PARTS", {}).items():
        own = style.from_gpt2(state, config, **{argument: part}).eval()
        with torch.inference_mode():
            difference = largest_difference(
                own.log_probs(tokens), other.log_probs(tokens)
            )
        default = getattr(arguments.get(argument), "default", None)
        used = getattr(default, "__name__", "another")
        if hasattr(nn, used):
            used = f"nn.{used}"
        note = f" ({notes[argument]})" if argument in notes else ""
        yield (
            f"{short_name(style.__name__)} ran with {used} here; with "
            f"its own {part.__name__}{note} the two differ by {difference:.2g}"
        )
