"""A benchmark's file, as the page's chart needs it."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard


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

    Its first run is taken, without the rows of the machine's limit.

    Raises:
        ValueError: for a file that cannot be read, or holds no times.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is no JSON") from None
    try:
        run = content["runs"][0]
        rows = [row for row in run["rows"] if not row["limit"]]
        facts = {"what": run["what"], **run["setting"]}
        bars = [
            _bar(row["name"], row["seconds"], row["tokens"]) for row in rows
        ]
    except (KeyError, TypeError, IndexError):
        bars = []
    except ValueError as error:
        raise ValueError(f"{path} is no benchmark: {error}") from None
    if not bars:
        raise ValueError(f"{path} is no benchmark: it has no rows of times")
    told = ", ".join(
        f"{name} {value}"
        for name, value in facts.items()
        if isinstance(value, str | int | float) and value is not False
    )
    return Bench(path.name, told, tuple(bars))


def _good(value: Any) -> TypeGuard[float]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _bar(name: Any, times: Any, tokens: Any) -> Bar:
    if not (isinstance(times, list) and times and all(map(_good, times))):
        raise ValueError(
            f"the seconds of {name!r} are not a list of numbers above 0"
        )
    first = median = third = times[0]
    if len(times) > 1:
        first, median, third = statistics.quantiles(
            times, n=4, method="inclusive"
        )
    speed = tokens / median if _good(tokens) else None
    return Bar(name, first, median, third, len(times), speed)
