"""gpt-duet bench: the package benchmarks, run by its name."""

import runpy
import sys
from importlib.util import find_spec
from typing import Annotated

import typer


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="...", help="See gpt-duet bench --help."),
    ] = None,
) -> None:
    """Measure speed: both styles, their peers, and the machine's limit."""
    if find_spec("benchmarks") is None:
        raise ValueError("the package benchmarks is not installed")
    sys.argv[1:] = words or []
    # by name: nothing of this package depends on the benchmarks
    runpy.run_module("benchmarks", run_name="__main__")
