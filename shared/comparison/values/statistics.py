"""Statistics in the place of a value, for models too large to keep."""

import torch
from jaxtyping import Float
from torch import Tensor

from .value import plain

NAMES = "mean, deviation, least, most and norm"


def statistics(value: Float[Tensor, "..."]) -> Float[Tensor, "5"]:
    """Return mean, deviation, least, most and norm of the finite numbers.

    In float64; the deviation is that of all numbers, not of a sample.
    """
    numbers = plain(value).flatten()
    numbers = numbers[numbers.isfinite()]
    if not numbers.numel():
        return torch.zeros(5, dtype=torch.float64)
    deviation, mean = torch.std_mean(numbers, correction=0)
    ends = *numbers.aminmax(), torch.linalg.vector_norm(numbers)
    return torch.stack([mean, deviation, *ends])


def of_one_size(found: Float[Tensor, "5"]) -> Float[Tensor, "5"]:
    """Return statistics with the norm over the root of the count.

    It is of the size of the others, and one bound of rounding fits all.
    """
    *others, norm = found.double()
    count = (norm / torch.hypot(*others[:2])) ** 2
    root = count.nan_to_num(1.0).round().clamp(1.0).sqrt()
    return torch.stack([*others, norm / root])


def reduced(value: Float[Tensor, "..."]) -> Float[Tensor, "5"]:
    """Return what is compared of a value beside statistics."""
    return of_one_size(statistics(value))
