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

        Rows are padded on the right by any ids of the vocabulary; what was
        read before must be as it was. Lengths are those without the padding.
        """
        block, longest = self._model.block_size, max(lengths)
        equally_long = min(lengths) == longest
        if equally_long and longest <= block and self._decoder is not None:
            if self._cache is None:
                self._cache = self._decoder.init_cache(len(lengths))
            new = rows[:, self._seen : longest]
            self._seen = longest
            return self._decoder.decode(new, self._cache)[:, -1]
        self._cache = None  # what it holds may have left the window
        width = min(block, longest)
        next_log_probs = getattr(self._model, "next_log_probs", None)
        if equally_long and next_log_probs is not None:
            return next_log_probs(rows[:, longest - width : longest])
        starts = [max(0, n - block) for n in lengths]
        windows = torch.stack(
            [row[s : s + width] for row, s in zip(rows, starts, strict=True)]
        )
        last = [n - s - 1 for n, s in zip(lengths, starts, strict=True)]
        return self._model.log_probs(windows)[range(len(last)), last]
