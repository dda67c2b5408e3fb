"""Rank, world size and reductions, for processes that train together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """This process's rank, and how many processes train together."""

    rank: int = 0  # rank of this process; only rank 0 writes files
    count: int = 1  # world size: the number of processes

    @property
    def first(self) -> bool:
        """Return whether this is the process that writes files."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """Return this process's rows of a batch."""
        return batch.chunk(self.count)[self.rank]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over the processes."""
        if self.count > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.count
        return value

    def any(self, value: bool, device: torch.device) -> bool:
        """Return whether a value is true in any of the processes."""
        if self.count == 1:
            return value
        return bool(self.mean(torch.tensor(float(value), device=device)) > 0)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return a module whose gradients are means over the processes."""
        return DistributedDataParallel(module) if self.count > 1 else module


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes of torchrun; without torchrun, there is only one.

    Gloo connects the processes, or NCCL if the model is on CUDA.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()


def own_device(device: torch.device) -> torch.device:
    """Return this process's device; on CUDA, each process has its own GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
