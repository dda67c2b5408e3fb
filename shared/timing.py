"""Time functions in turn, on any device."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils.benchmark import Timer

Quartiles = tuple[float, float, float]

SHORTEST = 0.02  # least seconds that are timed; a shorter run is repeated


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the first quartile, median and third quartile of numbers."""
    if len(values) == 1:
        return (values[0],) * 3
    first, median, third = statistics.quantiles(
        values, n=4, method="inclusive"
    )
    return first, median, third


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that `percent` % of the values do not exceed."""
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
    enough: Callable[[Mapping[str, Sequence[float]]], bool] | None = None,
) -> dict[str, list[float]]:
    """Time each function once in every round, in shuffled order.

    A slow moment of the machine then affects all runs, so that a ratio within
    a round is fair.

    Args:
        runs: for each name, a callable that returns the seconds it took.
        rounds: number of rounds.
        before: called with the round's number, from 0, before each round.
        budget: seconds after which no further round starts.
        seconds: a dict that gets the times of each complete round, for a
            caller that may be interrupted.
        enough: returns whether further rounds are needless after these times.
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
        if enough is not None and enough(seconds):
            break
    return seconds


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return, for each round, the first time divided by the second.

    A slow moment of the machine affects both times of a round, but not their
    ratio.
    """
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def median_error(values: Sequence[float]) -> float:
    """Return the relative error that a median exceeds in 1 of 20 cases.

    For a normal distribution, the standard error of the median is 1.25 times
    that of the mean, and the quartiles are 1.35 standard deviations apart.
    """
    if len(values) < 2:
        return math.inf
    first, middle, third = quartiles(values)
    spread = (third - first) / middle
    return 2 * 1.25 / 1.35 * spread / (len(values) - 1) ** 0.5


def stopwatch(
    run: Callable[[], object], device: torch.device
) -> Callable[[], float]:
    """Return a callable that runs something and returns its seconds.

    A short run is repeated, and the median counts. The first run does not
    count, because the caches still have the data of another run. The timer
    keeps the number of threads that torch uses now.
    """
    timer = Timer(
        "run()",
        timer=clock_for(device),
        globals={"run": run},
        num_threads=torch.get_num_threads(),
    )
    return lambda: timer.blocked_autorange(min_run_time=SHORTEST).median


def cold_stopwatch(
    run: Callable[[], object], device: torch.device, flush: Callable[[], None]
) -> Callable[[], float]:
    """Return a stopwatch that calls `flush`, untimed, before each run."""

    def timed() -> float:
        times: list[float] = []
        while not times or sum(times) < SHORTEST:
            flush()
            times.append(time_first(run, device))
        return statistics.median(times)

    return timed


def time_first(run: Callable[[], object], device: torch.device) -> float:
    """Run once and return the seconds, including warming up and compiling."""
    clock = clock_for(device)
    start = clock()
    run()
    return clock() - start


def clock_for(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device when it is read.

    torch's Timer also does this for CUDA, but only at the ends of a block of
    many runs.
    """
    if device.type == "cpu":
        return time.perf_counter

    def clock() -> float:
        if device.type == "mps":
            torch.mps.synchronize()  # in 2.6, the call below does not wait
        else:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    return clock
