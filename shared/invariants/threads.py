"""How many threads are worth their while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiplications of a forward pass below which several threads wait for each
# other longer than they compute.
SMALL_WORK = 2e9


@contextmanager
def few_threads(
    parameters: int, tokens: int, count: int | None = None
) -> Iterator[int]:
    """Compute on one thread inside where a model and its input are small.

    With a count, on as many.
    """
    before = torch.get_num_threads()
    if count is None:
        count = 1 if parameters * tokens < SMALL_WORK else before
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
