"""Two styles from one set of weights, and the verdict."""

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

LIKELIEST = 5  # next tokens that are shown


@dataclass(frozen=True)
class Comparison:
    """The differences of two styles, stage by stage."""

    styles: tuple[str, str]  # names of the two
    config: GPTConfig  # what both were built from
    weights: str  # where the weights come from, in words
    dtype: str  # "float32" or "float64"
    device: str  # where both ran
    differences: dict[str, float]  # largest absolute difference at each stage
    bound: float  # of log-probabilities: what rounding explains
    parameters: Sequence[dict[str, int]]  # of each style by component
    # of each style the likeliest next ids with their probabilities
    next_tokens: Sequence[list[tuple[int, float]]]
    seconds: Sequence[Quartiles]  # of one forward pass of each style
    threads: int  # with how many it was timed
    original_parts: list[str]  # how far parts would be that did not run

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


@dataclass(frozen=True)
class Pair:
    """Two styles that ran one set of weights on the same tokens."""

    styles: tuple[Style, Style]  # the two packages
    config: GPTConfig  # sizes of both models
    state: Mapping[str, Tensor]  # the weights in the GPT-2 layout
    tokens: Int[Tensor, "batch time"]  # that both ran, on one device
    models: tuple[Any, Any]  # each style's, in eval mode
    log_probs: tuple[Tensor, Tensor]  # of each model, for every position
    differences: dict[str, float]  # the largest at each common stage

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two packages, as users write them."""
        left, right = (short_name(style.__name__) for style in self.styles)
        return left, right


def make_pair(
    styles: tuple[Style, Style],
    config: GPTConfig,
    state: Mapping[str, Tensor],
    tokens: Int[Tensor, "batch time"],
) -> Pair:
    """Build both styles from one set of weights, and run them once.

    Raises:
        ValueError: for too many tokens, or a style that builds another
            config.
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
    """Measure how far two styles differ, and what each costs.

    The second is the reference for what rounding explains. The weights say in
    words where they come from; without threads small models are timed on one.
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
    """Build each style with each part of its own, and compare."""
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
