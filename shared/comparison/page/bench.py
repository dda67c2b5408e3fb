"""A benchmark's file, as the page's chart needs it."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bar:
    """The times of one thing that was measured.

    Attributes:
        name: what ran.
        first: first quartile of its seconds.
        median: their median.
        third: third quartile.
        rounds: how many there were.
        speed: tokens a second, or None where the file does not say.
    """

    name: str
    first: float
    median: float
    third: float
    rounds: int
    speed: float | None


@dataclass(frozen=True)
class Bench:
    """What a benchmark's file says.

    Attributes:
        file: its name.
        facts: what was measured, in words.
        bars: one for each thing that ran.
    """

    file: str
    facts: str
    bars: tuple[Bar, ...]


def read_bench(path: Path) -> Bench:
    """Read what `python -m benchmarks forward --json FILE` wrote.

    Raises:
        ValueError: for a file that cannot be read, or holds no times.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is no JSON") from None
    seconds = content.get("seconds") if isinstance(content, dict) else None
    if not isinstance(seconds, dict) or not seconds:
        raise ValueError(f"{path} is no benchmark: it has no 'seconds'")
    for name, times in seconds.items():
        if not (isinstance(times, list) and times and all(map(_good, times))):
            raise ValueError(
                f"{path} is no benchmark: the seconds of {name!r} are not "
                "a list of numbers above 0"
            )
    work = [content.get("batch"), content.get("time")]
    tokens = math.prod(work) if all(map(_good, work)) else None
    bars = [
        _bar(name, [*map(float, t)], tokens) for name, t in seconds.items()
    ]
    facts = [
        f"{name} {value}"
        for name, value in content.items()
        if isinstance(value, str | int | float)
    ]
    return Bench(path.name, ", ".join(facts), tuple(bars))


def _good(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _bar(name: str, times: list[float], tokens: int | None) -> Bar:
    first = median = third = times[0]
    if len(times) > 1:
        first, median, third = statistics.quantiles(
            times, n=4, method="inclusive"
        )
    speed = None if tokens is None else tokens / median
    return Bar(name, first, median, third, len(times), speed)
