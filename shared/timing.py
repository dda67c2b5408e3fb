"""Times of things that run in turn, on any device."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils.benchmark import Timer

Quartiles = tuple[float, float, float]

SHORTEST = 0.02  # seconds that are timed at least: what is quick runs again


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return first quartile, median and third quartile of some numbers."""
    if len(values) == 1:
        return (values[0],) * 3
    first, median, third = statistics.quantiles(
        values, n=4, method="inclusive"
    )
    return first, median, third


def percentile(values: Sequence[float], percent: int) -> float:
    """Return what so many in 100 of the values do not exceed."""
    if len(values) == 1:
        return values[0]
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    return hundredths[percent - 1]


def interleave(
    runs: Mapping[str, Callable[[], float]],
    rounds: int,
    before: Callable[[int], None] = lambda number: None,
    budget: float = math.inf,
    seconds: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """Time each run once a round, in a shuffled order.

    A slow moment of the machine then hits all of them alike, and a ratio
    taken within each round is fair.

    Args:
        runs: for each name a callable that returns the seconds it took.
        rounds: how many.
        before: called with the round's number, from 0, before each round.
        budget: seconds after which no further round starts.
        seconds: takes the times of each round as soon as it is whole, for
            a caller that is interrupted.
    """
    end = time.monotonic() + budget
    order = random.Random(0)
    seconds = {} if seconds is None else seconds
    for number in range(rounds):
        if number > 0 and time.monotonic() > end:
            break
        before(number)
        shuffled = order.sample(list(runs), len(runs))
        times = {name: runs[name]() for name in shuffled}
        for name in runs:
            seconds.setdefault(name, []).append(times[name])
    return seconds


def stopwatch(
    run: Callable[[], object], device: torch.device
) -> Callable[[], float]:
    """Return a callable that runs something and returns its seconds.

    What is quick runs many times, and the median counts; every time is
    preceded by a run that does not count, because in a round another thing
    has just filled the caches. It runs with torch's present number of
    threads.
    """
    timer = Timer(
        "run()",
        timer=clock_for(device),
        globals={"run": run},
        num_threads=torch.get_num_threads(),
    )
    return lambda: timer.blocked_autorange(min_run_time=SHORTEST).median


def time_first(run: Callable[[], object], device: torch.device) -> float:
    """Run once and return the seconds: warming up and compiling included."""
    clock = clock_for(device)
    start = clock()
    run()
    return clock() - start


def clock_for(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device whenever it is read.

    So does torch's Timer for CUDA; its blocks are long next to the waiting.
    """
    if device.type == "cpu":
        return time.perf_counter

    def clock() -> float:
        if device.type == "mps":
            torch.mps.synchronize()  # the other does not wait in torch 2.6
        else:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    return clock
