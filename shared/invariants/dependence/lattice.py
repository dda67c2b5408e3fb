"""The codes a shadow holds: which tokens a number can depend on.

A number is KNOWN (computed from buffers and literals alone, so that its value
is at hand), FREE (from parameters or random numbers, so that it can have any
value), or depends on tokens up to a position: the code is that position. The
largest operand's code is the result's, as KNOWN < FREE < 0. A number that a
mask has made as good as minus infinity keeps its code, raised by HIDDEN; one
that a token may have made so (is it padding?) has it raised by LOWERED.
"""

import torch
from torch import Tensor

KNOWN, FREE = -2, -1
LOWERED, HIDDEN = 1 << 13, 1 << 14
LONGEST = LOWERED - 4  # tokens of a proof
CODES = torch.int16

STRONG = -1e8  # a finite mask up to here is an assumption
WEAK = -100.0  # one up to here looks like a mask, and hides nothing
# The lowest number over the root of a width as large as 4096 hides, too; in
# float16, where scores come near it, only the lowest itself.
LOWEST = {torch.float16: 0.49}


def lowest(dtype: torch.dtype) -> float:
    """Return the number that counts as minus infinity in a dtype."""
    if dtype == torch.float64:  # no score comes near the lowest float32
        dtype = torch.float32
    return torch.finfo(dtype).min * LOWEST.get(dtype, 1 / 64)


def is_hidden(codes: Tensor) -> Tensor:
    """Where numbers are as good as minus infinity."""
    return codes >= HIDDEN + KNOWN


def plain(codes: Tensor) -> Tensor:
    """Return what numbers depend on, hidden or lowered or not."""
    codes = torch.where(is_hidden(codes), codes - HIDDEN, codes)
    return torch.where(codes >= LOWERED + KNOWN, codes - LOWERED, codes)


def is_lowered(codes: Tensor) -> Tensor:
    """Where a token decides whether numbers are as good as minus infinity."""
    codes = torch.where(is_hidden(codes), codes - HIDDEN, codes)
    return codes >= LOWERED + KNOWN


def as_lowered(codes: Tensor, where: Tensor) -> Tensor:
    """Mark numbers as lowered, of those that depend on a token."""
    where = where & (codes > FREE) & ~is_lowered(codes)
    return torch.where(where, codes + LOWERED, codes)


def as_hidden(codes: Tensor, where: Tensor) -> Tensor:
    """Mark numbers as hidden; a known one shows its value itself."""
    if not bool(where.any()):
        return codes
    return torch.where(where & (codes > KNOWN), codes + HIDDEN, codes)


def full(code: int, dims: int, device: torch.device | None = None) -> Tensor:
    """Return one code for all numbers of a tensor."""
    return torch.full((1,) * dims, code, dtype=CODES, device=device)


def lined_up(codes: Tensor, dims: int) -> Tensor:
    """Return codes with axes of size 1 in front, up to as many dims."""
    lacking = dims - codes.dim()
    return codes[(None,) * lacking] if lacking else codes


def united(first: Tensor, *others: Tensor) -> Tensor:
    """Return the largest of some codes, broadcast."""
    for codes in others:
        first = torch.maximum(first, codes)
    return first


def over(codes: Tensor, dims: list[int] | int) -> Tensor:
    """Return the largest code over some axes, kept as size 1."""
    dims = [dims] if isinstance(dims, int) else dims
    if codes.dim() == 0 or all(codes.size(d) == 1 for d in dims):
        return codes
    return codes.amax(dims, keepdim=True)


def thin(values: Tensor) -> Tensor:
    """Return values with size 1 along the axes they are expanded along."""
    for axis, stride in enumerate(values.stride()):
        if stride == 0 and values.size(axis) > 1:
            values = values.narrow(axis, 0, 1)
    return values


def where_known(codes: Tensor, true: Tensor) -> Tensor:
    """Return where numbers are known and true says so of their values.

    The answer is as small as the codes, unless numbers that share a code
    differ in it.
    """
    known = codes == KNOWN
    true = thin(true)
    for axis in range(codes.dim()):
        if known.size(axis) == 1 and true.size(axis) > 1:
            every, some = true.all(axis, True), true.any(axis, True)
            if bool((known & (every != some)).any()):
                continue
            true = every
    return known & true
