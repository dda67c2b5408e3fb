"""The choice of the next token: greedy, temperature, top-k, top-p."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..validation import is_number, whole_number


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen from log-probabilities.

    Temperature first, then top-k, then top-p of what top-k left.

    Raises:
        ValueError: naming the setting and the value.

    Source: Fan et al. 2018 (Hierarchical Neural Story Generation) for top-k;
    Holtzman et al. 2020 (The Curious Case of Neural Text Degeneration) for
    top-p.
    """

    temperature: float = 0.0  # 0 is greedy; 1 is the model's distribution
    top_k: int | None = None  # keep the k likeliest, or all there are
    top_p: float | None = None  # keep the fewest that reach this probability

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn from."""
        if not is_number(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature must be a number from 0, got {self.temperature}"
            )
        if self.top_k is not None:
            whole_number("top_k", self.top_k, at_least=1)
        if self.top_p is not None and not (
            is_number(self.top_p) and 0 < self.top_p <= 1
        ):
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def choose(
        self,
        log_probs: Float[Tensor, "batch vocab"],
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch"]:
        """Return one id a row; the first of several that are likeliest.

        Raises:
            ValueError: where a row holds NaN, or nothing but -inf.
        """
        best, likeliest = log_probs.max(dim=-1)
        if not best.isfinite().all():
            row = int((~best.isfinite()).nonzero()[0])
            raise ValueError(
                f"row {row} has no distribution to choose from: its largest "
                f"log-probability is {best[row].item()}"
            )
        if self.temperature == 0 or self.top_k == 1:
            return likeliest
        probs = self.probabilities(log_probs)
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1)

    def probabilities(
        self, log_probs: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return what is drawn from, at a temperature above 0."""
        scores = log_probs
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float()
        # With the largest score at 0 no temperature is too small, except
        # that the dtype must be able to hold it.
        limits = torch.finfo(scores.dtype)
        temperature = min(max(self.temperature, limits.tiny), limits.max)
        scores = scores - scores.amax(dim=-1, keepdim=True)
        scores = scores / temperature
        if self.top_k is not None and self.top_k < scores.size(-1):
            kept = scores.topk(self.top_k).indices
            dropped = torch.ones_like(scores, dtype=torch.bool)
            dropped = dropped.scatter(-1, kept, False)
            scores = scores.masked_fill(dropped, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            probs = scores.softmax(dim=-1)
            probs, order = probs.sort(dim=-1, descending=True, stable=True)
            reached = probs.cumsum(dim=-1) - probs >= self.top_p
            dropped = torch.empty_like(reached).scatter(-1, order, reached)
            scores = scores.masked_fill(dropped, float("-inf"))
        return scores.softmax(dim=-1)
