"""The peak memory of a run, and the operations that take its time."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Kineto announces each of its starts on stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that a run holds beyond what was there before.

    The result is part of it, the weights are not; None where an accelerator
    keeps no count.
    """
    if device.type == "cpu":
        return _peak_on_cpu(run)
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    result = run()  # noqa: F841  held, as a caller would
    module.synchronize(device)
    return module.max_memory_allocated(device) - before


def _peak_on_cpu(run: Callable[[], object]) -> int:
    run()  # what is allocated once, and kept, is no part of a run
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        result = run()  # noqa: F841  held, as a caller would
    # the trace is the profiler's only public record of every allocation
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        p.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
        and event["args"]["Device Type"] == 0
    ]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((change for _, change in changes), initial=0))


def time_by_operation(
    run: Callable[[], object], device: torch.device, top: int = 8
) -> dict[str, float]:
    """Return the parts of a run's time that its slowest operations take.

    The other operations are "others"; all parts add up to 1.
    """
    run()
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    with profile(activities=activities) as p:
        for _ in range(5):
            run()
    times = own_times(p.key_averages(), accelerator=len(activities) > 1)
    total = sum(times.values()) or 1.0
    ranked = sorted(times.items(), key=lambda pair: -pair[1])
    parts = {name: seconds / total for name, seconds in ranked[:top]}
    return parts | {"others": 1 - sum(parts.values())}


def own_times(events: Iterable[Any], accelerator: bool) -> dict[str, float]:
    """Return the time of each operation itself, without those it calls.

    On an accelerator only kernels and copies count: the operation that
    launches a kernel, and a range around it, report the same time again.
    """
    if not accelerator:
        return {e.key: float(e.self_cpu_time_total) for e in events}
    return {
        e.key: float(e.self_device_time_total)
        for e in events
        if e.device_type != DeviceType.CPU and not e.is_user_annotation
    }
