"""Measure the peak memory of a run."""

import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# otherwise Kineto, torch's profiler, prints a message on stderr at each start
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak bytes that a run adds to those already held.

    This includes the result of the run, but not the weights. Return None if
    the accelerator does not count memory.
    """
    if device.type == "cpu":
        return _peak_on_cpu(run)
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    result = run()  # noqa: F841  keep it, as a caller would
    module.synchronize(device)
    return module.max_memory_allocated(device) - before


def _peak_on_cpu(run: Callable[[], object]) -> int:
    run()  # a first run allocates what later runs reuse
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        result = run()  # noqa: F841  keep it, as a caller would
    # read the profiler's trace, because nothing else records all allocations
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
