"""Find facts about the machine: its load, memory and best speed."""

import ctypes
import os
import platform
import re
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from gpt_duet.benchmark_results import Row, Value
from gpt_duet.timing import clock_for, interleave, stopwatch
from gpt_duet.validation import choose_dtype

DTYPES = ("float32", "bfloat16", "float16")
LIBRARIES = ("torch", "transformers", "x-transformers")
SQUARE = 1536  # side of a matrix: large enough for the best speed, yet fast
BIG_SQUARE = 8192  # side of a matrix on an accelerator, which needs more
MOVED = 2**27  # bytes that a copy or sum moves: more than most caches hold
LIMIT_ROUNDS = 5

# numbers of two parameters of mallopt, from glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def machine_facts(device: torch.device) -> dict[str, Value]:
    """Return the facts on which times depend: processor, cores, versions."""
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda device: device.type)
    facts: dict[str, Value] = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "accelerator": "none" if device.type == "cpu" else name(device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for library in LIBRARIES:
        try:
            facts[library] = version(library)
        except PackageNotFoundError:
            facts[library] = "none"
    return facts


def dtype_on(device: torch.device, name: str) -> torch.dtype:
    """Return a dtype by its name; ValueError if the device lacks it."""
    dtype = choose_dtype(name, DTYPES)
    try:
        x = torch.ones(4, 4, dtype=dtype, device=device)
        torch.mm(x, x).sum().item()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{device} has no {name} ({reason})") from None
    return dtype


def load() -> float:
    """Return how many processes were busy on average in the last minute."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees.

    glibc returns large blocks to the system. The next allocation then pays for
    new pages, which can take a third of a forward pass. With another C
    library, nothing changes.

    Source: the GNU C Library's manual, "Malloc Tunable Parameters".
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)  # no separate memory mappings for large blocks
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def cache_flusher(device: torch.device) -> Callable[[], None]:
    """Return a function that fills a device's caches with unrelated memory."""
    size = MOVED
    for text in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size"):
        size = max(size, 2 * 1024 * int(text.read_text().strip(" K\n")))
    memory = torch.zeros(size // 4, device=device)

    def flush() -> None:
        memory.add_(1)
        clock_for(device)()  # waits until the device has finished

    return flush


@cache  # limits are measured once in a process
def limits(
    dtype: torch.dtype, device: torch.device, threads: int
) -> list[Row]:
    """Measure a device's best speed in a dtype, with this many threads."""
    tasks = limit_tasks(dtype, device)
    watches = {n: stopwatch(run, device) for n, (run, _) in tasks.items()}
    times = interleave(watches, LIMIT_ROUNDS)
    return [
        Row(name, times[name], limit=True, **work)
        for name, (_, work) in tasks.items()
    ]


def limit_tasks(
    dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[Callable[[], Tensor], dict[str, int]]]:
    """Return tasks that show the best speed of a device, with their work.

    The tasks are: a product of two square matrices; a copy, which reads as
    many bytes as it writes; and two sums, which only read. One of the sums
    reads from the processor's caches.
    """
    size = SQUARE if device.type == "cpu" else BIG_SQUARE
    a, b = torch.randn(2, size, size, device=device).to(dtype).unbind(0)
    product = torch.empty_like(a)
    source = torch.ones(MOVED // 4, device=device)
    target = torch.zeros_like(source)
    memory = f"{MOVED >> 20} MiB"
    little, moved = source[: MOVED // 32], "least_bytes"
    multiply = partial(torch.mm, a, b, out=product)
    copy = partial(target.copy_, source)
    return {
        f"matmul {size} x {size}": (multiply, {"flops": 2 * size**3}),
        f"copy of {memory}": (copy, {moved: 2 * MOVED}),
        f"read of {memory}": (source.sum, {moved: MOVED}),
        f"read of {MOVED >> 23} MiB": (little.sum, {moved: MOVED // 8}),
    }
