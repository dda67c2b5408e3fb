"""Make all ranks (processes of torchrun) take the same steps together.

A check runs on all ranks at once, and its model calls collectives. So all
ranks must make the same calls in the same order. Therefore random numbers come
from the kit's generators, and the time from rank 0's clock. If ranks return
different scores, those of rank 0 are used. An exception on one rank is raised
on all ranks. In a single process this module does nothing.
"""

import atexit
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from itertools import islice
from time import perf_counter
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .tolerances import RANK_GRADIENT_SHARE

PATIENCE = 300  # seconds until a rank that does not arrive counts as lost
FRAMES = 16  # most frames from an operation to the code of FSDP
SIZE = 2048  # bytes of a message; a longer one is sent as two
Measure = Callable[[Tensor, Tensor], tuple[float, float, int]]
# statuses, worst first: the verdict is the worst status of any rank
WORST = ("failed", "error", "parted", "skipped", "passed")


class RankLost(BaseException):
    """Raised when a rank ends or does not arrive: no check can continue."""


class RankRaised(ValueError):
    """Raised on each rank for an exception on another rank."""


class Parted(BaseException):
    """Raised when another rank takes a different step, or ends the check."""


class Ranks:
    """This process, among the ranks that check a model together."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.clock = 0.0  # seconds on rank 0's clock at the last exchange
        # on this rank's clock: time of the last exchange, longest wait so far
        self.since, self.longest = perf_counter(), 0.0
        self.stage = "the start"  # name of the running check
        # the largest distance between a rank's scores and rank 0's, in
        # multiples of the ignored rounding, and a sentence about it
        self.apart: tuple[float, str] = (0.0, "")
        self.own_texts = False  # whether each rank runs a different text
        # parameters that are equal on all ranks, but have different gradients
        self.partial: set[str] = set()
        self.serial = 0  # number of steps that all ranks have made together
        # whether the verdict comes from a rank with less evidence
        self.weaker = False
        try:
            self.group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=PATIENCE)
            )
        except RuntimeError as error:
            raise self._lost(error) from None

    def _exchange(self, data: bytes, size: int) -> list[bytes]:
        """Return the messages of all ranks, each at most `size` bytes long."""
        padded = bytearray(data[:size].ljust(size, b"\0"))
        own = torch.frombuffer(padded, dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.count)]
        try:
            dist.all_gather(every, own, group=self.group)
        except RuntimeError as error:
            raise self._lost(error) from None
        now = perf_counter()
        self.longest = max(self.longest, now - self.since)
        self.since = now
        return [bytes(one.numpy()).rstrip(b"\0") for one in every]

    def _lost(self, error: Exception) -> RankLost:
        first = str(error).split("\n")[0][:200]
        return RankLost(
            f"rank {self.rank}: another rank ended, or did not arrive within "
            f"{PATIENCE} s, in {self.stage} ({first})"
        )

    def gather(self, own: Any = None, what: str = "a text") -> list[Any]:
        """Wait for all ranks; return the JSON value of each rank.

        Raises:
            Parted: if another rank makes a different step.
        """
        text = json.dumps([what, perf_counter(), own]).encode()
        data = b"%8d" % len(text) + text
        with _outside():
            found = self._exchange(data, SIZE)
            longest = 8 + max(int(message[:8]) for message in found)
            if longest > SIZE:
                found = self._exchange(data, longest)
        every = [json.loads(message[8:]) for message in found]
        self.clock = every[0][1]
        for rank, (other, *_) in enumerate(every):
            if other != what:
                raise Parted(
                    f"the ranks take different ways: rank {self.rank} is at "
                    f"{what}, rank {rank} at {other}"
                )
        return [theirs for *_, theirs in every]

    def reduced(self, values: Tensor, how: str = "SUM") -> Tensor:
        """Return the elementwise sum or maximum ("MAX") over all ranks."""
        self.gather(what="numbers")
        with _outside(), torch.no_grad():
            kind = values.dtype if values.is_floating_point() else torch.int64
            total = values.detach().to("cpu", kind, copy=True).contiguous()
            dist.all_reduce(
                total, getattr(dist.ReduceOp, how), group=self.group
            )
        return total.to(values)

    def sums(self, values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return each named tensor's sum over all ranks, in one exchange."""
        if not values:
            return {}
        flat = [value.double().flatten() for value in values.values()]
        parts = self.reduced(torch.cat(flat)).split([*map(len, flat)])
        pairs = zip(values.items(), parts, strict=True)
        return {name: part.view(value.shape) for (name, value), part in pairs}

    def by_name(self, own: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return, by name, each rank's value; None for a rank without one.

        For example, pipeline stages have parameters with different names.
        """
        every = self.gather({**own})
        names = dict.fromkeys(name for one in every for name in one)
        return {name: [one.get(name) for one in every] for name in names}

    def finish(self, what: str, own: Any) -> list[Any]:
        """Wait until all ranks have finished a step; return their values."""
        while True:
            try:
                return self.gather(own, f"the end of {what}")
            except Parted:
                # gather again, which tells the others that this rank has
                # finished
                continue

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the body on all ranks; raise a rank's exception on all ranks."""
        self.serial += 1
        what = f"{what} ({self.serial})"
        self.gather(what=what)
        raised: BaseException | None = None
        try:
            yield
        except (Exception, Parted) as error:
            raised = error
        own = isinstance(raised, Exception)
        words = f"{type(raised).__name__}: {raised}" if own else ""
        found = self.finish(what, [self.serial, words])
        self.serial = max(serial for serial, _ in found)
        for rank, (_, text) in enumerate(found):
            if text and not own:
                raise RankRaised(f"rank {rank}: {text}")
        if raised is not None:
            raise raised

    def same(self, scores: Tensor, measure: Measure) -> Tensor:
        """Return rank 0's scores, with this rank's autograd graph.

        `measure` compares this rank's scores with rank 0's. It returns the
        largest difference in multiples of the ignored rounding, its size, and
        its position.
        """
        with _outside(), torch.no_grad():
            own = scores.detach().cpu().contiguous()
            told = [f"{tuple(own.shape)} {own.dtype}", bits(own)]
        every = self.gather(told, "the scores")
        if every.count(told) == self.count:
            return scores
        for rank, (kind, _) in enumerate(every):
            if kind != every[0][0]:
                raise RankRaised(
                    f"rank 0 returns scores of another shape or dtype than "
                    f"rank {rank}: {every[0][0]} and {kind}"
                )
        with _outside(), torch.no_grad():
            first = own.clone()
            dist.broadcast(first, 0, group=self.group)
            apart = measure(own, first)
        shares = self.gather(apart, "the difference")
        rank = max(range(self.count), key=lambda one: shares[one][0])
        share, size, at = shares[rank]
        if share > self.apart[0]:
            self.apart = (
                share,
                f"rank {rank} returns other scores than rank 0: position "
                f"{at} moves by {size:.2g} at length {first.size(1)}",
            )
        # computed from this rank's scores, to keep their autograd graph and
        # the codes of a proof
        common = scores + (first.to(scores.device) - scores).detach()
        with _outside():
            common.data.copy_(first)
        return common

    def inner(
        self, products: Mapping[str, tuple[Tensor, float]]
    ) -> list[tuple[float, float]]:
        """Return directional derivatives from the parts of all ranks.

        A rank's part may be the whole derivative, or a term of a sum. So each
        parameter has two results. If all parts are equal, these are one part
        and the sum; otherwise both are the sum.

        Args:
            products: by name, this rank's parameter and its part of the
                directional derivative.
        """
        with _outside(), torch.no_grad():
            own = {
                name: [part, bits(local(p).detach().cpu().contiguous())]
                for name, (p, part) in products.items()
            }
        found = []
        for name, pairs in self.by_name(own).items():
            parts = [0.0 if pair is None else pair[0] for pair in pairs]
            size = max(map(abs, parts))
            if all(
                abs(part - parts[0]) <= RANK_GRADIENT_SHARE * size
                for part in parts
            ):
                found.append((parts[0], sum(parts)))
                continue
            if None not in pairs and len({bits for _, bits in pairs}) == 1:
                self.partial.add(name)
            found.append((sum(parts), sum(parts)))
        return found

    def begin(self, name: str) -> None:
        """Begin a check on all ranks."""
        self.stage = name
        self.partial.clear()
        self.gather(what=name)

    def worst(
        self, name: str, status: str, message: str, evidence: int
    ) -> tuple[str, str]:
        """Return the worst verdict of all ranks, with the name of the rank.

        If several ranks have this verdict, the one with the least evidence
        counts.
        """
        found = self.finish(name, [status, evidence, message])
        order = [(WORST.index(kind), proof) for kind, proof, _ in found]
        rank = order.index(min(order))
        self.weaker = evidence > order[rank][1]
        status, _, message = found[rank]
        where = f"rank {rank}: " if len({*order}) > 1 else ""
        return "error" if status == "parted" else status, where + message


def bits(tensor: Tensor) -> int:
    """Return a number that is equal for tensors with equal bits."""
    own = tensor.clone()  # NumPy would make the tensor's storage unresizable
    return zlib.crc32(own.reshape(-1).view(torch.uint8).numpy().data)


_ranks: Ranks | None = None  # the ranks, while several check a model


@contextmanager
def _outside() -> Iterator[None]:
    """Run the operations of the body outside the active torch modes."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
    ):
        yield


@contextmanager
def joined() -> Iterator[None]:
    """Let all ranks run the body together, if there are several."""
    global _ranks
    several = (
        _ranks is None
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and dist.get_backend() != "fake"
    )
    if not several:
        yield
        return
    _ranks = _ranks_of(dist.group.WORLD)
    try:
        yield
    except RankLost as error:
        raise ValueError(str(error)) from None
    finally:
        _ranks = None


@lru_cache(maxsize=1)
def _ranks_of(world: object) -> Ranks:
    """Return the ranks of a process group, which are created once."""
    atexit.register(_ranks_of.cache_clear)  # left threads would abort the exit
    return Ranks()


def current() -> Ranks | None:
    """Return the ranks that check a model together, None for one process."""
    return _ranks


def first() -> bool:
    """Return whether this process writes the results."""
    return _ranks is None or _ranks.rank == 0


def now() -> float:
    """Return the seconds on the clock of rank 0."""
    return perf_counter() if _ranks is None else _ranks.clock


def together(what: str) -> AbstractContextManager[None]:
    """Run the body on all ranks at once."""
    return nullcontext() if _ranks is None else _ranks.together(what)


def same(scores: Tensor, measure: Measure) -> Tensor:
    """Return the scores of rank 0."""
    if _ranks is None or _ranks.own_texts:
        return scores
    return _ranks.same(scores, measure)


def largest(values: Tensor) -> Tensor:
    """Return the elementwise largest numbers over all ranks."""
    return values if _ranks is None else _ranks.reduced(values, "MAX")


def largest_of(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the largest number over all ranks, by name."""
    if _ranks is None:
        return dict(sizes)
    found = _ranks.by_name(sizes).items()
    return {
        name: max(n for n in all_of if n is not None) for name, all_of in found
    }


def union(own: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return all ranks' records without repeats, in one order for all."""
    every = [[*own]] if _ranks is None else _ranks.gather([*own], "a union")
    return [*dict.fromkeys(tuple(one) for theirs in every for one in theirs)]


def on_any(value: bool) -> bool:
    """Return whether a value is true on at least one rank."""
    return bool(largest(torch.tensor([int(value)]))) if _ranks else value


def local(tensor: Tensor) -> Any:
    """Return the part of a tensor that this rank holds."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed and isinstance(tensor, distributed.DTensor):
        return tensor._local_tensor
    return tensor


def local_row(parameter: Tensor, row: int) -> int | None:
    """Return where this rank's part of a parameter has a row, or None."""
    if local(parameter) is parameter:
        return row
    from torch.distributed.tensor import _utils as shards

    whole: Any = parameter
    shape, start = shards.compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    at = row - start[0]
    return at if 0 <= at < shape[0] else None


def in_fully_shard() -> bool:
    """Return whether code of torch.distributed.fsdp is running."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    frames = islice(walk_stack(sys._getframe()), FRAMES)
    names = (frame.f_globals.get("__name__", "") for frame, _ in frames)
    return any(name.startswith("torch.distributed.fsdp.") for name in names)


def local_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a gradient that belongs to this rank's weights."""
    if local(gradient) is not gradient:
        where: Any = parameter
        whole: Any = gradient
        gradient = whole.redistribute(placements=where.placements)
    return local(gradient).to_dense()
