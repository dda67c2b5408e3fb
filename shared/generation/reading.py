"""Next-token log-probabilities, with a key-value cache where there is one."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..protocol import CachedLanguageModel, LanguageModel


class Reader:
    """Reads rows of tokens that grow at their ends.

    A model with `init_cache` and `decode` reads each token once, as long as
    all rows are equally long and fit into its block. Once the window is
    full it slides, and every token in it has a new position: from then on
    the window is computed anew for each token, as for models without a
    cache and for rows of different lengths.

    Args:
        model: a causal language model.
    """

    def __init__(self, model: LanguageModel):
        self._model = model
        self._decoder = None
        if isinstance(model, CachedLanguageModel):
            self._decoder = model
        self._cache: Any = None
        self._seen = 0

    def last_log_probs(
        self, rows: Int[Tensor, "batch longest"], lengths: Sequence[int]
    ) -> Float[Tensor, "batch vocab"]:
        """Return what follows the last token of each row.

        Args:
            rows: ids, padded on the right by any ids of the vocabulary; what
                was read before must be as it was.
            lengths: number of tokens of each row that are no padding.
        """
        model, longest = self._decoder, max(lengths)
        fits = min(lengths) == longest <= self._model.block_size
        if not fits or model is None:
            self._cache = None  # what was read may have left the window
            return last_log_probs(self._model, rows, lengths)
        if self._cache is None:
            self._cache = model.init_cache(len(lengths))
        new = rows[:, self._seen : longest]
        self._seen = longest
        return model.decode(new, self._cache)[:, -1]


def last_log_probs(
    model: LanguageModel,
    rows: Int[Tensor, "batch longest"],
    lengths: Sequence[int],
) -> Float[Tensor, "batch vocab"]:
    """Return what follows the last token of each row.

    Args:
        model: a causal language model.
        rows: ids, padded on the right by any ids of the vocabulary.
        lengths: number of tokens of each row that are no padding.
    """
    width = min(model.block_size, max(lengths))
    if min(lengths) == max(lengths):
        window = rows[:, lengths[0] - width : lengths[0]]
        next_log_probs = getattr(model, "next_log_probs", None)
        if next_log_probs is not None:
            return next_log_probs(window)
        return model.log_probs(window)[:, -1]
    starts = [max(0, n - model.block_size) for n in lengths]
    windows = torch.stack(
        [row[s : s + width] for row, s in zip(rows, starts, strict=True)]
    )
    last = [n - s - 1 for n, s in zip(lengths, starts, strict=True)]
    return model.log_probs(windows)[range(len(last)), last]
