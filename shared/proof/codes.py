"""The codes of numbers: which tokens each can depend on, and where they lie.

A number is KNOWN (computed only from buffers and literals, so that its value
is at hand), FREE (from parameters or random numbers, so that it can have any
value), or depends on tokens up to a position: the code is that position. The
largest operand's code is the result's, as KNOWN < FREE < 0. A number that a
mask has made as good as minus infinity keeps its code, raised by HIDDEN; one
that a token may have made so (is it padding?) has it raised by LOWERED.

Codes belong to a storage, so that views and in-place operations need no rule.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# --- Codes -------------------------------------------------------------------

KNOWN, FREE = -2, -1
LOWERED, HIDDEN = 1 << 13, 1 << 14
LONGEST = LOWERED - 4  # tokens of a proof
CODES = torch.int16

STRONG = -1e8  # a finite mask up to here is an assumption
WEAK = -100.0  # one up to here looks like a mask, and hides nothing
# The lowest number over the root of a width as large as 4096 hides as well; in
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
    return ((codes - KNOWN) & (LOWERED - 1)) + KNOWN


def is_lowered(codes: Tensor) -> Tensor:
    """Where a token decides whether numbers are as good as minus infinity."""
    return ((codes - KNOWN) & LOWERED) > 0


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


# --- Shadows by storage ------------------------------------------------------

PRUNE = 512  # shadows written between two looks for storages that are gone


@dataclass
class Shadow:
    """The codes of one storage.

    Attributes:
        size, stride: of a tensor that covers the storage.
        codes: as many axes; size 1 where all along an axis share one.
        itemsize: bytes of a number.
        low, top: no code is smaller, none is larger.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    codes: Tensor
    itemsize: int
    low: int
    top: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return the codes of a tensor that lies in the storage."""
        size, stride = tensor.size(), tensor.stride()
        offset = int(tensor.storage_offset())
        if offset == 0 and (size, stride) == (self.size, self.stride):
            return self.codes
        if self.codes.numel() == 1:
            return self.codes.reshape((1,) * len(size))
        seen = self._lean_view(size, stride, offset)
        if seen is None:  # join axes that the view runs across
            inner = self.codes.dim()
            while inner and self.codes.size(inner - 1) == 1:
                inner -= 1
            shape = self.size[:inner] + self.codes.shape[inner:]
            self.codes = self.codes.expand(shape).contiguous()
            seen = self._lean_view(size, stride, offset)
        if seen is None:
            self.flatten()
            seen = self.codes.as_strided(size, stride, offset)
        return seen

    def _lean_view(
        self, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> Tensor | None:
        """Translate a view's strides to the codes' own, where it can be."""
        axes: list[list[int]] = []  # stride and size in numbers, and in codes
        at = range(len(self.size))
        for step, count, axis in sorted(
            zip(self.stride, self.size, at, strict=True), reverse=True
        ):
            if count < 2:
                continue
            own = self.codes.stride(axis) if self.codes.size(axis) > 1 else 0
            outer = axes[-1] if axes else [0, 0, 0]
            if (outer[0], outer[2]) == (step * count, own * count):
                axes[-1] = [step, outer[1] * count, own]
            else:
                axes.append([step, count, own])
        last, start = [], self.codes.storage_offset()
        for step, _, own in axes:
            last.append(offset // step)
            start += offset // step * own
            offset %= step
        if offset:
            return None
        sizes, strides = [], []
        for count, step in zip(size, stride, strict=False):
            own = 0
            if step and count > 1:
                i = next((i for i, a in enumerate(axes) if a[0] <= step), -1)
                if i < 0 or step % axes[i][0]:
                    return None
                last[i] += (count - 1) * (step // axes[i][0])
                own = step // axes[i][0] * axes[i][2]
            sizes.append(count if own or not count else 1)
            strides.append(own)
        if any(n >= axis[1] for n, axis in zip(last, axes, strict=False)):
            return None
        return self.codes.as_strided(sizes, strides, start)

    def flatten(self) -> None:
        """Hold a code for each number, in the order of the storage."""
        count = math.prod(self.size)
        flat = self.codes.new_empty(count)
        laid = flat.as_strided(self.size, self.stride)
        laid.copy_(self.codes.expand(self.size))
        self.size, self.stride, self.codes = (count,), (1,), flat

    def recount(self, itemsize: int, count: int) -> None:
        """Count in numbers of another size: a complex one is two real ones."""
        self.flatten()
        more = itemsize // self.itemsize
        if more > 1 and self.codes.numel() % more == 0:
            codes = plain(self.codes).unflatten(0, (-1, more)).amax(1)
        elif self.itemsize > itemsize:
            codes = self.codes.repeat_interleave(self.itemsize // itemsize)
        else:
            codes = full(self.top, 1, self.codes.device)
        if codes.numel() != count:  # the storage was resized
            codes = full(self.top, 1, codes.device).expand(count).clone()
        self.codes, self.size, self.itemsize = codes, (count,), itemsize


SEEN = Shadow((), (), full(KNOWN, 0), 1, KNOWN, KNOWN)  # and nothing more


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie side by side, each once."""
    after = 1
    for step, count in sorted(
        zip(tensor.stride(), tensor.size(), strict=False)
    ):
        if count > 1 and step != after:
            return False
        after *= count
    return tensor.storage_offset() == 0


class Storages:
    """The shadow of each storage that lives.

    A weak reference to a storage keeps its address from being used again.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, Shadow]] = {}
        self._written = 0

    def find(self, tensor: Tensor) -> Shadow | None:
        """Return the shadow of the storage a tensor lies in."""
        storage = tensor.untyped_storage()
        found = self._of.get(storage._cdata)
        if found is None:
            return None
        count = storage.nbytes() // tensor.itemsize
        shadow = found[1]
        if shadow is SEEN:
            return shadow
        if shadow.itemsize != tensor.itemsize or (
            math.prod(shadow.size) != count
        ):
            shadow.recount(tensor.itemsize, count)
        return shadow

    def state(self, tensor: Tensor) -> tuple[int, ...]:
        """Return what differs after each write to a tensor's storage."""
        shadow = self.find(tensor)
        if shadow is None:
            return ()
        codes = shadow.codes
        version = -1 if codes.is_inference() else codes._version
        return id(shadow), id(codes), version

    def is_new(self, tensor: Tensor) -> bool:
        """Whether no tensor in this storage was seen before."""
        return tensor.untyped_storage()._cdata not in self._of

    def meet(self, tensor: Tensor) -> None:
        """Note that a storage was seen, where no codes are needed."""
        self._put(tensor.untyped_storage(), SEEN)

    def codes(self, tensor: Tensor) -> Tensor:
        """Return the codes of a tensor that has a shadow."""
        shadow = self.find(tensor)
        assert shadow is not None
        return shadow.view(tensor)

    def lives(self, key: int) -> bool:
        """Whether a storage lives still."""
        return key in self._of and not self._of[key][0].expired()

    def refill(self, key: int, code: int) -> None:
        """Give all of a storage that is known another code."""
        shadow = self._of[key][1]
        shadow.codes = full(code, 1).expand(math.prod(shadow.size))
        shadow.size, shadow.stride = (math.prod(shadow.size),), (1,)
        shadow.low, shadow.top = code, code

    def fill(self, tensor: Tensor, code: int) -> None:
        """Give a whole storage one code."""
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.itemsize
        codes = full(code, 1, tensor.device)
        self._put(
            storage, Shadow((count,), (1,), codes, tensor.itemsize, code, code)
        )

    def write(self, tensor: Tensor, codes: Tensor) -> None:
        """Give a tensor its codes, which broadcast to its shape."""
        storage = tensor.untyped_storage()
        size, stride = tensor.size(), tensor.stride()
        count = storage.nbytes() // tensor.itemsize
        low = top = KNOWN
        if codes.numel():
            low, top = map(int, codes.aminmax())
        if tensor.numel() == count and _dense(tensor):
            new = Shadow(size, stride, codes, tensor.itemsize, low, top)
            self._put(storage, new)
            return
        for axis in range(tensor.dim()):  # numbers that share a place
            if tensor.stride(axis) == 0 and tensor.size(axis) > 1:
                codes = codes.amax(axis, keepdim=True)
                tensor = tensor.narrow(axis, 0, 1)
        size, stride = tensor.size(), tensor.stride()
        if self.is_new(tensor):
            self.fill(tensor, KNOWN)
        shadow = self.find(tensor)
        assert shadow is not None
        shadow.flatten()  # others may share the codes as they are
        shadow.low, shadow.top = min(shadow.low, low), max(shadow.top, top)
        view = shadow.codes.as_strided(size, stride, tensor.storage_offset())
        view.copy_(codes.clone().expand(size))  # it may be read from there

    def copy(self, source: Tensor, made: Tensor) -> None:
        """Give a storage that is another's copy the shadow of that one."""
        _, shadow = self._of[source.untyped_storage()._cdata]
        self._put(made.untyped_storage(), copy(shadow))

    def _put(self, storage: torch.UntypedStorage, shadow: Shadow) -> None:
        key = storage._cdata
        known = self._of.get(key)
        reference = known[0] if known else StorageWeakRef(storage)
        self._of[key] = reference, shadow
        self._written += 1
        if self._written % PRUNE == 0:
            gone = [k for k, (ref, _) in self._of.items() if ref.expired()]
            for k in gone:
                del self._of[k]
