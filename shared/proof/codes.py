"""Store, for each tensor entry, the last token that it can depend on.

Each entry has a dependency code. An entry computed only from buffers and
literals is KNOWN, and rules may read it. An entry from parameters or random
draws is FREE: it can have any value. The code of any other entry is the
position of the last token that can change it. A result has the largest code of
its operands, where KNOWN < FREE < 0. HIDDEN is added to a code if a mask makes
the entry count as minus infinity. LOWERED is added if it may be that low.

Codes belong to storages, so views and in-place operations need no rules.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..running.operations import is_plain

# --- Codes -------------------------------------------------------------------

KNOWN, FREE = -2, -1
LOWERED, HIDDEN = 1 << 13, 1 << 14
LONGEST = LOWERED - 4  # most tokens in a text that a proof runs
SIGN = LONGEST + 1  # decided by the sign of a 0, which any token may change
CODES = torch.int16

STRONG = -1e8  # a proof assumes that a mask value at or below this hides
WEAK = -100.0  # a mask value between STRONG and this may hide nothing
# A mask's value may be divided by the root of a width of up to 4096. So a
# number hides if it is at most a 64th of the dtype's lowest. Scores in float16
# can be that low, so there a number must be about half of the lowest.
LOWEST = {torch.float16: 0.49}


def lowest(dtype: torch.dtype) -> float:
    """Return the largest number that counts as minus infinity in a dtype."""
    if dtype == torch.float64:  # float32's bound is low enough
        dtype = torch.float32
    return torch.finfo(dtype).min * LOWEST.get(dtype, 1 / 64)


def is_constant(parameter: Tensor) -> bool:
    """Return whether a parameter holds a mask or whole numbers, not weights.

    A frozen parameter of zeros and ones counts as a mask. So does one with a
    number that is low enough to hide a token.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return True
    trained = parameter.requires_grad or parameter.is_complex()
    if trained or not (parameter.numel() and is_plain(type(parameter))):
        return False
    # float8 has no aminmax, which reads the numbers only once
    numbers = parameter.float() if parameter.itemsize == 1 else parameter
    low, top = map(float, numbers.aminmax())
    if (low, top) == (0, 1):
        return bool(((numbers == 0) | (numbers == 1)).all())
    return low <= STRONG


def is_hidden(codes: Tensor) -> Tensor:
    """Return which numbers count as minus infinity for all tokens."""
    return codes >= HIDDEN + KNOWN


def plain(codes: Tensor) -> Tensor:
    """Return codes without the marks for hidden or lowered numbers."""
    return ((codes - KNOWN) & (LOWERED - 1)) + KNOWN


def is_lowered(codes: Tensor) -> Tensor:
    """Return which numbers may count as minus infinity, but need not."""
    return ((codes - KNOWN) & LOWERED) > 0


def as_lowered(codes: Tensor, where: Tensor | None = None) -> Tensor:
    """Mark all numbers, or those at `where`, as lowered, but no known one."""
    may = (codes > KNOWN) & ~is_lowered(codes)
    may = may if where is None else where & may
    return torch.where(may, codes + LOWERED, codes)


def as_hidden(codes: Tensor, where: Tensor) -> Tensor:
    """Mark the numbers at `where` as hidden; known ones need no mark."""
    if not bool(where.any()):
        return codes
    return torch.where(where & (codes > KNOWN), codes + HIDDEN, codes)


def as_dtype(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of numbers of this dtype: only floats are hidden.

    Minus infinity becomes a low integer, or the boolean True.
    """
    if dtype.is_floating_point or not bool((hidden := is_hidden(codes)).any()):
        return codes
    if dtype == torch.bool:
        return plain(codes)
    return as_lowered(plain(codes), hidden | is_lowered(codes))


def bounds_of(codes: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest dependency code."""
    if not codes.numel():
        return KNOWN, KNOWN
    low, top = codes.aminmax()
    return int(low), int(top)


def full(code: int, dims: int, device: torch.device | None = None) -> Tensor:
    """Return a tensor of `dims` axes with one code for all its numbers."""
    return torch.full((1,) * dims, code, dtype=CODES, device=device)


def lined_up(codes: Tensor, dims: int) -> Tensor:
    """Add leading axes of size 1 to the codes, up to `dims` axes."""
    lacking = dims - codes.dim()
    return codes[(None,) * lacking] if lacking else codes


def united(first: Tensor, *others: Tensor) -> Tensor:
    """Broadcast dependency codes, and return their elementwise maximum."""
    for codes in others:
        first = torch.maximum(first, codes)
    return first


def over(codes: Tensor, dims: list[int] | int) -> Tensor:
    """Return the largest code along some axes, which then have size 1."""
    dims = [dims] if isinstance(dims, int) else dims
    if codes.dim() == 0 or all(codes.size(d) == 1 for d in dims):
        return codes
    return codes.amax(dims, keepdim=True)


def thin(values: Tensor) -> Tensor:
    """Return a view of values in which each expanded axis has size 1."""
    for axis, stride in enumerate(values.stride()):
        if stride == 0 and values.size(axis) > 1:
            values = values.narrow(axis, 0, 1)
    return values


def where_known(codes: Tensor, true: Tensor) -> Tensor:
    """Return where `true` holds and the number is known.

    The result has the shape of `codes`. If known entries share a code but
    differ in `true`, that axis has its length in `true`.
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


SHORT_BYTES = 64  # longer values are represented by a digest


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's numbers, or a digest if it is large."""
    with torch._C.DisableTorchFunction():  # modes must not record the copy
        # a copy, because torch marks memory that it shares with an array
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        flat = copied.reshape(-1).view(torch.uint8)
        found = bytes(flat.numpy())
    if len(found) > SHORT_BYTES:
        return blake2b(found, digest_size=20).digest()
    return found


@dataclass
class Codes:
    """Immutable codes, because several storages may share them.

    Attributes:
        codes: the codes.
        low, top: bounds of the codes.
    """

    codes: Tensor
    low: int
    top: int

    @cached_property
    def digest(self) -> Any:
        """Return a key that is equal for equal codes of the same shape."""
        if self.low == self.top and self.codes.numel() == 1:
            return self.low
        return self.codes.shape, bytes_of(self.codes)


def codes_of(codes: Tensor) -> Codes:
    """Return dependency codes together with their bounds."""
    return Codes(codes, *bounds_of(codes))


# --- Shadows by storage ------------------------------------------------------

PRUNE = 512  # writes after which shadows of freed storages are removed


@dataclass
class Shadow:
    """The dependency codes of the numbers in one storage.

    Attributes:
        size, stride: the shape of a tensor that covers the storage, and its
            strides.
        codes: the codes, with as many axes as `size`. Along an axis of size 1
            all numbers share a code.
        itemsize: bytes of a number.
        low, top: bounds of the codes.
        named: the codes whose digest was computed last.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    codes: Tensor
    itemsize: int
    low: int
    top: int
    named: Codes | None = None

    @property
    def digest(self) -> Any:
        """Return a key that is equal for equal codes of the same shape."""
        if self.named is None or self.named.codes is not self.codes:
            self.named = Codes(self.codes, self.low, self.top)
        return self.named.digest

    def view(self, tensor: Tensor) -> Tensor:
        """Return the dependency codes of a tensor in the storage."""
        size, stride = tensor.size(), tensor.stride()
        offset = int(tensor.storage_offset())
        if offset == 0 and (size, stride) == (self.size, self.stride):
            return self.codes
        if self.codes.numel() == 1:
            return self.codes.reshape((1,) * len(size))
        seen = self._lean_view(size, stride, offset)
        if seen is None:  # the view crosses axes, so give each entry a code
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
        """Return the codes of a view, or None if no strides express them."""
        axes: list[list[int]] = []  # each: stride, size, stride in codes
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
        """Store one code for each number, in the order of the memory."""
        count = math.prod(self.size)
        flat = self.codes.new_empty(count)
        laid = flat.as_strided(self.size, self.stride)
        laid.copy_(self.codes.expand(self.size))
        self.size, self.stride, self.codes = (count,), (1,), flat

    def recount(self, itemsize: int, count: int) -> None:
        """Adapt the codes to a view whose numbers have more or fewer bytes."""
        self.flatten()
        more = itemsize // self.itemsize
        if more > 1 and self.codes.numel() % more == 0:
            codes = _most_of(self.codes.unflatten(0, (-1, more)))
        elif self.itemsize > itemsize:
            codes = self.codes.repeat_interleave(self.itemsize // itemsize)
        else:
            codes = _most_of(self.codes.unsqueeze(0))
        if codes.numel() != count:  # a call resized the storage
            codes = _most_of(self.codes.unsqueeze(0)).expand(count).clone()
        self.codes, self.size, self.itemsize = codes, (count,), itemsize


def _most_of(codes: Tensor) -> Tensor:
    """Return the largest code of each row; some number may be low."""
    low = (is_hidden(codes) | is_lowered(codes)).any(1)
    return as_lowered(plain(codes).amax(1), low)


SEEN = Shadow((), (), full(KNOWN, 0), 1, KNOWN, KNOWN)
# the shadow of a storage whose numbers are all known


def _dense(tensor: Tensor) -> bool:
    """Return whether a tensor starts at offset 0, without gaps or overlaps."""
    if tensor.is_contiguous():
        return tensor.storage_offset() == 0
    after = 1
    for step, count in sorted(
        zip(tensor.stride(), tensor.size(), strict=False)
    ):
        if count > 1 and step != after:
            return False
        after *= count
    return tensor.storage_offset() == 0


class Storages:
    """Holds the shadow (the codes) of each living storage.

    A weak reference to a storage keeps its address from being reused.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, Shadow]] = {}
        self._shared: dict[int, StorageWeakRef] = {}
        self._written = 0

    def find(self, tensor: Tensor) -> Shadow | None:
        """Return the shadow of a tensor's storage."""
        return self.find_in(tensor.untyped_storage(), tensor)

    def find_in(
        self, storage: torch.UntypedStorage, tensor: Tensor
    ) -> Shadow | None:
        """Return the shadow of a storage, fitted to the tensor's item size."""
        found = self._of.get(storage._cdata)
        if found is None:
            return None
        shadow = found[1]
        if shadow is SEEN:
            return shadow
        count = storage.nbytes() // tensor.itemsize
        if shadow.itemsize != tensor.itemsize or (
            math.prod(shadow.size) != count
        ):
            shadow.recount(tensor.itemsize, count)
        return shadow

    def state(self, tensor: Tensor) -> tuple[int, ...]:
        """Return a key that changes with each write to a tensor's storage."""
        shadow = self.find(tensor)
        if shadow is None:
            return ()
        codes = shadow.codes
        version = -1 if codes.is_inference() else codes._version
        return id(shadow), id(codes), version

    def is_new(self, tensor: Tensor) -> bool:
        """Return whether no tensor of this storage was recorded before."""
        return tensor.untyped_storage()._cdata not in self._of

    def has(self, key: int) -> bool:
        """Return whether a tensor of this storage was recorded before."""
        return key in self._of

    def meet(self, tensor: Tensor) -> None:
        """Record that all numbers in a tensor's storage are known."""
        self._put(tensor.untyped_storage(), SEEN)

    def codes(self, tensor: Tensor) -> Tensor:
        """Return the dependency codes of a tensor that has a shadow."""
        shadow = self.find(tensor)
        assert shadow is not None
        return shadow.view(tensor)

    def lives(self, key: int) -> bool:
        """Return whether a storage is alive."""
        return key in self._of and not self._of[key][0].expired()

    def computed(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Yield the living storages whose numbers depend on tokens."""
        for key, (reference, shadow) in self._of.items():
            if shadow.top > FREE and not reference.expired():
                again = torch.UntypedStorage._new_with_weak_ptr
                yield key, again(reference.cdata)

    def share(self, tensor: Tensor) -> None:
        """Record that Python code may read a tensor's memory from now on."""
        storage = tensor.untyped_storage()
        self._shared[storage._cdata] = StorageWeakRef(storage)

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether an array, or Python code, may share the memory."""
        storage = tensor.untyped_storage()
        return storage._cdata in self._shared or not storage.resizable()

    def refill(self, key: int, code: int) -> None:
        """Set one code for all numbers of a storage that already has codes."""
        shadow = self._of[key][1]
        shadow.codes = full(code, 1).expand(math.prod(shadow.size))
        shadow.size, shadow.stride = (math.prod(shadow.size),), (1,)
        shadow.low, shadow.top = code, code

    def fill(self, tensor: Tensor, code: int) -> None:
        """Give all numbers of a storage the same dependency code."""
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.itemsize
        codes = full(code, 1, tensor.device)
        self._put(
            storage, Shadow((count,), (1,), codes, tensor.itemsize, code, code)
        )

    def write(
        self,
        tensor: Tensor,
        made: Codes,
    ) -> None:
        """Set a tensor's codes; `made` broadcasts to the tensor's shape."""
        storage = tensor.untyped_storage()
        size, stride = tensor.size(), tensor.stride()
        count = storage.nbytes() // tensor.itemsize
        codes, low, top = made.codes, made.low, made.top
        if tensor.numel() == count and _dense(tensor):
            new = Shadow(size, stride, codes, tensor.itemsize, low, top)
            new.named = made
            self._put(storage, new)
            return
        for axis in range(tensor.dim()):  # an expanded axis repeats one place
            if tensor.stride(axis) == 0 and tensor.size(axis) > 1:
                codes = codes.amax(axis, keepdim=True)
                tensor = tensor.narrow(axis, 0, 1)
        size, stride = tensor.size(), tensor.stride()
        if self.is_new(tensor):
            self.fill(tensor, KNOWN)
        shadow = self.find(tensor)
        assert shadow is not None
        shadow.flatten()  # give each number its own code
        shadow.low, shadow.top = min(shadow.low, low), max(shadow.top, top)
        view = shadow.codes.as_strided(size, stride, tensor.storage_offset())
        view.copy_(codes.clone().expand(size))  # `codes` may view this memory

    def copy(self, source: Tensor, made: Tensor) -> None:
        """Give the copy of a storage a copy of the original's shadow."""
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
