"""A benchmark's file, as the page's chart needs it."""

from dataclasses import dataclass
from pathlib import Path

from ..benchmark_results import Row, read_results


@dataclass(frozen=True)
class Bench:
    """The first run of a benchmark's file.

    Attributes:
        file: its name.
        facts: what was measured, in words.
        rows: the models that ran, without what the machine can do.
    """

    file: str
    facts: str
    rows: list[Row]


def read_bench(path: Path) -> Bench:
    """Read what `gpt-duet bench forward --json FILE` wrote."""
    runs = read_results(path).runs
    if not runs or not runs[0].models:
        raise ValueError(f"{path} is no benchmark: it has no rows of times")
    run = runs[0]
    return Bench(path.name, f"{run.what}, {run.described()}", run.models)
