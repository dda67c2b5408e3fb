"""Choose the next token: greedy, temperature, top-k, top-p."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..validation import is_number, whole_number


@dataclass(frozen=True)
class Sampler:
    """The settings with which the next token is chosen.

    Temperature is applied first, then top-k. Last, top-p is applied to the
    tokens that top-k keeps.

    Raises:
        ValueError: for a wrong setting; the message names it and its value.

    Source: Fan et al. 2018 (Hierarchical Neural Story Generation) for top-k;
    Holtzman et al. 2020 (The Curious Case of Neural Text Degeneration) for
    top-p.
    """

    temperature: float = 0.0  # 0 is greedy; 1 is the model's distribution
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest up to this probability sum

    def __post_init__(self) -> None:
        """Raise ValueError for invalid settings."""
        if not is_number(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature must be a number of at least 0, got "
                f"{self.temperature}"
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
        """Return one id for each row; a greedy choice takes the first best id.

        Raises:
            ValueError: if a row holds NaN, or only -inf.
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
        """Return the probabilities of the draw, at a temperature above 0."""
        scores = log_probs
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float()
        # The largest score becomes 0, so any temperature works that the dtype
        # can represent.
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
