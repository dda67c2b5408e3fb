"""gpt-duet bench: gpt_duet.benchmarks, run by its name."""

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
    # by name: nothing of this package depends on the benchmarks
    import_module(f"{KIT}.benchmarks.app").main()
