"""Describe a model to time: how to call it, and how it decodes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpt_duet.protocol import cache_reader


@dataclass(frozen=True)
class Candidate:
    """A model to time, which scores the next token at each position."""

    name: str  # name in the table
    model: Any  # the model
    call: Callable[[Tensor], Any]  # returns the answer to ids (batch, time)
    output: str = "logits"  # "logits" or "log-probs"
    note: str = ""  # what a reader of the model's row should know
    style: bool = True  # whether the model is a style, else a peer
    configured: bool = True  # whether the plan's config set its sizes
    vocab_size: int | None = None  # set if the model's own sizes are used
    longest: int | None = None  # most tokens in a row that the model reads
    # takes a number of rows, and returns a function that reads a text in
    # pieces with a cache from the user's --cache; None without --cache
    reader: Callable[[int], Callable[[Tensor], Tensor]] | None = None

    def scores(self, tokens: Tensor) -> Tensor:
        """Return scores (batch, time, vocab) of ids (batch, time).

        The scores are the model's answer itself, its `logits`, or its first
        element.
        """
        found = self.call(tokens)
        found = getattr(found, "logits", found)
        return found[0] if isinstance(found, tuple | list) else found

    @property
    def cached_by(self) -> str:
        """Return who provides the cache for decoding, or ""."""
        if self.reader is not None:
            return "user"  # the cache that the user's --cache makes
        if hasattr(self.model, "generation_config"):
            return "transformers"
        return "kit" if cache_reader(self.model) is not None else ""

    def decode(self, ids: Tensor, new: int) -> Iterator[Tensor]:
        """Yield the likeliest new ids, of shape (batch,), step by step.

        The user's cache is used, if there is one. Otherwise the model reads
        the whole text for each new id.
        """
        read = self.reader(len(ids)) if self.reader else self.scores
        for _ in range(new):
            column = read(ids)[:, -1:].argmax(dim=-1)
            yield column[:, 0]
            ids = column if self.reader else torch.cat([ids, column], dim=1)

    @property
    def parameters(self) -> int | None:
        """Return the number of parameters, with a tied matrix counted once."""
        if not hasattr(self.model, "parameters"):
            return None
        return sum(p.numel() for p in self.model.parameters())

    def compared(self, ours: "Candidate") -> str:
        """Say how far the number of parameters differs, if by over 1 %."""
        count, theirs = self.parameters, ours.parameters or 0
        if count is None:
            return "parameters unknown"
        extra = (count - theirs) / theirs if theirs else 0
        return f"{extra:+.1%} parameters" if abs(extra) > 0.01 else ""

    def with_log_probs(self) -> "Candidate":
        """Return the candidate with log-softmax added after its scores."""
        if self.output == "log-probs":
            return self
        return replace(
            self,
            call=lambda tokens: self.scores(tokens).log_softmax(dim=-1),
            output="log-probs",
        )

    def compiled(self) -> "Candidate":
        """Return the compiled model; a style must become a single graph."""
        call = torch.compile(self.scores, fullgraph=self.style, dynamic=False)
        name = f"{self.name} compiled"
        return replace(self, name=name, call=call, note="")
