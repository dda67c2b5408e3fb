"""gpt-duet bench: the package benchmarks, run by its name."""

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="...", help="See gpt-duet bench --help."),
    ] = None,
) -> None:
    """Measure speed: both styles, their peers, and the machine's limit."""
    ours = Path(__file__).resolve().parents[2]
    if not (ours / "benchmarks" / "__main__.py").is_file():
        raise ValueError("the package benchmarks is not installed")
    sys.argv[1:] = words or []
    sys.path.insert(0, str(ours))  # a user's project may have benchmarks, too
    try:
        import_module("benchmarks")
    finally:
        sys.path.remove(str(ours))
    # by name: nothing of this package depends on the benchmarks
    runpy.run_module("benchmarks", run_name="__main__")
