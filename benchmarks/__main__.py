"""Runs the benchmarks as `python -m benchmarks`."""

from shared.cli import run

from .forward import app

run(app)
