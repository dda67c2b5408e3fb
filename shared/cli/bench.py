"""gpt-duet bench: run gpt_duet.benchmarks."""

import sys
from importlib import import_module
from typing import Annotated

import typer

from ..names import KIT


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="...", help="See gpt-duet bench --help."),
    ] = None,
) -> None:
    """Measure speed: both styles, their peers, and the machine's limit."""
    sys.argv[1:] = words or []
    # import by name, so that this package does not depend on the benchmarks
    import_module(f"{KIT}.benchmarks.app").main()
