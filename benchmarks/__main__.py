"""Runs the benchmarks as `python -m benchmarks`."""

from shared.console import run

from .app import main

run(main)
