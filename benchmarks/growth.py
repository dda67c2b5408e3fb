"""How time grows with the length of the text, against the formula."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .results import Run


@dataclass(frozen=True)
class Growth:
    """How one thing's time grows with the length of the text.

    Attributes:
        name: what ran.
        batch: number of rows.
        times: tokens in a row, ascending.
        flops: operations by the closed formula, at each time.
        seconds: medians, at each time.
    """

    name: str
    batch: int
    times: list[int]
    flops: list[int]
    seconds: list[float]

    @property
    def measured(self) -> float:
        """Seconds at the longest text over those at the shortest."""
        return self.seconds[-1] / self.seconds[0]

    @property
    def expected(self) -> float:
        """Operations at the longest text over those at the shortest."""
        return self.flops[-1] / self.flops[0]

    @property
    def exponent(self) -> float:
        """How time follows the operations: seconds ~ operations^exponent.

        1 grows as the formula does, less grows slower. By least squares of
        the logarithms over all times, each weighted by its operations: a
        short text is mostly overhead, which flattens an unweighted line
        and so hides what grows too fast at the other end. A line of
        seconds over operations would call that overhead's slope, too.
        """
        x, y = np.log(self.flops), np.log(self.seconds)
        # polyfit weighs what is then squared
        slope, _ = np.polyfit(x, y, 1, w=np.sqrt(self.flops))
        return float(slope)


def growth(runs: Sequence[Run], least: int = 3) -> list[Growth]:
    """Collect each row's times over runs that differ in time alone.

    Args:
        runs: of any kind; those without operations are passed over.
        least: fewer times than this say nothing about growth.
    """
    lines: dict[tuple, dict[int, tuple[int, float]]] = {}
    for run in runs:
        others = {k: v for k, v in run.setting.items() if k != "time"}
        for row in run.models if {"time", "batch"} <= {*run.setting} else ():
            if row.flops:
                name = (row.name, int(others["batch"]))
                line = (name, run.what, *sorted(others.items()))
                points = lines.setdefault(line, {})
                time = int(run.setting["time"])
                points[time] = row.flops, row.timing.median
    found = []
    for ((name, batch), *_), points in lines.items():
        if len(points) >= least:
            times = sorted(points)
            flops, seconds = zip(*(points[t] for t in times), strict=True)
            found.append(Growth(name, batch, times, [*flops], [*seconds]))
    return found
