"""A model to time: how it is called, and what decodes with its cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpt_duet.protocol import cache_reader


@dataclass(frozen=True)
class Candidate:
    """Something that scores the next token at every position."""

    name: str  # in the table
    model: Any  # what computes
    call: Callable[[Tensor], Any]  # (batch, time) ids to scores, or an answer
    output: str = "logits"  # or "log-probs"
    note: str = ""  # what a reader of its row has to know
    style: bool = True  # not a peer
    configured: bool = True  # built of the plan's config
    vocab_size: int | None = None  # of one that chose its sizes itself
    longest: int | None = None  # tokens that it reads in a row at most
    # from a number of rows to what reads pieces of text one after another,
    # with a cache that the user's function makes
    reader: Callable[[int], Callable[[Tensor], Tensor]] | None = None

    def scores(self, tokens: Tensor) -> Tensor:
        """Return scores (batch, time, vocab) of ids (batch, time).

        They are the answer, its `logits`, or its first part.
        """
        found = self.call(tokens)
        found = getattr(found, "logits", found)
        return found[0] if isinstance(found, tuple | list) else found

    @property
    def cached_by(self) -> str:
        """Who keeps its keys and values in decoding, "" for nobody."""
        if self.reader is not None:
            return "user"  # by the function that was named
        if hasattr(self.model, "generation_config"):
            return "transformers"
        return "kit" if cache_reader(self.model) is not None else ""

    def decode(self, ids: Tensor, new: int) -> Iterator[Tensor]:
        """Yield new ids (batch,), the likeliest ones.

        The user's cache serves where there is one, else the whole text is
        read for each of them.
        """
        read = self.reader(len(ids)) if self.reader else self.scores
        for _ in range(new):
            column = read(ids)[:, -1:].argmax(dim=-1)
            yield column[:, 0]
            ids = column if self.reader else torch.cat([ids, column], dim=1)

    @property
    def parameters(self) -> int | None:
        """Number of parameters, a tied matrix once; None for no module."""
        if not hasattr(self.model, "parameters"):
            return None
        return sum(p.numel() for p in self.model.parameters())

    def compared(self, ours: "Candidate") -> str:
        """Say by how much its parameters are not ours to 1 %."""
        count, theirs = self.parameters, ours.parameters or 0
        if count is None:
            return "parameters unknown"
        extra = (count - theirs) / theirs if theirs else 0
        return f"{extra:+.1%} parameters" if abs(extra) > 0.01 else ""

    def with_log_probs(self) -> "Candidate":
        """Return the same, ending in log-softmax."""
        if self.output == "log-probs":
            return self
        return replace(
            self,
            call=lambda tokens: self.scores(tokens).log_softmax(dim=-1),
            output="log-probs",
        )

    def compiled(self) -> "Candidate":
        """Return the same through torch.compile; a style in one graph."""
        call = torch.compile(self.scores, fullgraph=self.style, dynamic=False)
        name = f"{self.name} compiled"
        return replace(self, name=name, call=call, note="")
