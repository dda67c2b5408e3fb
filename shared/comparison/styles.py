"""Compare two styles that run one set of weights."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..agreement import largest_difference, rounding_bound
from ..config import GPTConfig
from ..names import short_name
from ..protocol import Style
from ..running.context import few_threads
from ..timing import Quartiles
from ..validation import dtype_name
from .models import compare_models, count_parameters, forward_times

LIKELIEST = 5  # likely next tokens to show for each style


@dataclass(frozen=True)
class Comparison:
    """The differences of two styles, stage by stage."""

    styles: tuple[str, str]  # names of the two styles
    config: GPTConfig  # the config of both models
    weights: str  # where the weights come from, in words
    dtype: str  # "float32" or "float64"
    device: str  # the device of both runs
    differences: dict[str, float]  # largest absolute difference at each stage
    bound: float  # the difference that rounding explains
    parameters: Sequence[dict[str, int]]  # counts of each style, by component
    # the likeliest next ids of each style, with probabilities
    next_tokens: Sequence[list[tuple[int, float]]]
    seconds: Sequence[Quartiles]  # times of one pass, for each style
    threads: int  # how many threads the timed passes used
    # sentences on how far the styles differ if one runs with its own class,
    # such as its norm; by default from_gpt2 uses PyTorch's class
    original_parts: list[str]

    @property
    def largest(self) -> float:
        """Return the largest difference in log-probabilities."""
        return self.differences["log_probs"]

    @property
    def one_function(self) -> bool:
        """Return whether rounding explains the largest difference.

        All positions and all tokens are compared. A NaN counts as different.
        """
        return self.largest <= self.bound

    @property
    def verdict(self) -> str:
        """Return the verdict in one line."""
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


@dataclass(frozen=True)
class Pair:
    """Two styles that ran one set of weights on the same tokens."""

    styles: tuple[Style, Style]  # the two packages
    config: GPTConfig  # sizes of both models
    state: Mapping[str, Tensor]  # the weights in the GPT-2 layout
    tokens: Int[Tensor, "batch time"]  # the text that both ran, on one device
    models: tuple[Any, Any]  # the model of each style, in eval mode
    # of each model: log-probabilities at every position
    log_probs: tuple[Tensor, Tensor]
    # the largest difference at each common stage
    differences: dict[str, float]

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the two packages, as users write them."""
        left, right = (short_name(style.__name__) for style in self.styles)
        return left, right


def make_pair(
    styles: tuple[Style, Style],
    config: GPTConfig,
    state: Mapping[str, Tensor],
    tokens: Int[Tensor, "batch time"],
) -> Pair:
    """Build both styles from one set of weights, and run each once.

    Raises:
        ValueError: for too many tokens, or if a style builds a model with
            another config.
    """
    left, right = (s.from_gpt2(state, config).eval() for s in styles)
    stages = styles[0].STAGES, styles[1].STAGES
    differences, log_probs = compare_models(left, right, stages, tokens)
    return Pair(
        styles, config, state, tokens, (left, right), log_probs, differences
    )


def compare_pair(
    pair: Pair, *, weights: str, threads: int | None = None
) -> Comparison:
    """Measure how far two styles differ, and what each of them costs.

    The second style is the reference for the effect of rounding.

    Args:
        pair: both styles, with their models, weights and outputs.
        weights: where the weights come from, in words.
        threads: CPU threads for the timing; None uses one for a small model.
    """
    reference, tokens = pair.models[1], pair.tokens
    dtype = next(reference.parameters()).dtype
    size = sum(p.numel() for p in reference.parameters())
    with few_threads(size, tokens.numel(), threads) as threads:
        return Comparison(
            styles=pair.names,
            config=pair.config,
            weights=weights,
            dtype=dtype_name(dtype),
            device=str(tokens.device),
            differences=pair.differences,
            bound=rounding_bound(reference, tokens, pair.log_probs[1]),
            parameters=[
                count_parameters(model, style.STAGES)
                for model, style in zip(pair.models, pair.styles, strict=True)
            ],
            next_tokens=[*map(_likeliest, pair.log_probs)],
            seconds=forward_times(pair.models, tokens),
            threads=threads,
            original_parts=[*_original_parts(pair)],
        )


def _likeliest(
    log_probs: Float[Tensor, "batch time vocab"],
) -> list[tuple[int, float]]:
    probs = log_probs[0, -1].double().exp()
    best = probs.topk(min(LIKELIEST, len(probs)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _original_parts(pair: Pair) -> Iterator[str]:
    """Yield a sentence for each of a style's parts that from_gpt2 replaces.

    It says how far the two styles differ if the style keeps its own part.
    """
    for name, style, other in zip(
        pair.names, pair.styles, pair.log_probs[::-1], strict=True
    ):
        build: Any = style.from_gpt2
        notes = getattr(style, "ORIGINAL_PARTS_NOTES", {})
        arguments = inspect.signature(build).parameters
        for argument, part in getattr(style, "ORIGINAL_PARTS", {}).items():
            with torch.inference_mode():
                own = build(pair.state, pair.config, **{argument: part}).eval()
                apart = largest_difference(own.log_probs(pair.tokens), other)
            default = getattr(arguments.get(argument), "default", None)
            used = getattr(default, "__name__", "another")
            if hasattr(nn, used):
                used = f"nn.{used}"
            note = f" ({notes[argument]})" if argument in notes else ""
            yield (
                f"In this comparison {name} ran with {used}; with its own "
                f"{part.__name__}{note} the log-probabilities of the two "
                f"models differ by {apart:.2g}"
            )
