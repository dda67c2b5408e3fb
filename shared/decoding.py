"""What follows a text, with each token read once where a model can."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .protocol import CachedLanguageModel, LanguageModel


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
        self._cached = None
        if isinstance(model, CachedLanguageModel):
            self._cached = model
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
        model, longest = self._cached, max(lengths)
        fits = min(lengths) == longest <= self._model.block_size
        if not fits or model is None:
            self._cache = None  # the memory is of no more use
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


def store_by_columns(model: nn.Module) -> None:
    """Store the weights of linear layers column by column, in place.

    Names, shapes and values stay; only the order in memory changes. One
    token at a time is a matrix-vector product, which waits for memory: on
    two cores in float32 it read 15 GB/s of rows and 20 to 25 GB/s of
    columns. Shorter floats go through other kernels, which want rows, and
    are left alone. For training it is no help: an embedding that is tied
    to the head then gathers its rows from all over.

    Args:
        model: any module with nn.Linear in it.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.itemsize >= 4:
            weight = module.weight.data
            module.weight.data = weight.t().contiguous().t()
