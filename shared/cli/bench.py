"""gpt-duet bench: python -m benchmarks under this command's name."""

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer


def bench(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="...", help="What follows is python -m benchmarks's own."
        ),
    ] = None,
) -> None:
    """Measure speed: both styles, their peers, and the machine's limit."""
    if find_spec("benchmarks") is None:
        raise ValueError("the package benchmarks is not installed")
    # by name: nothing of this package depends on the benchmarks
    benchmarks = import_module("benchmarks.app").app
    benchmarks(args=words or [], prog_name=context.command_path)
