"""Runs the benchmarks as `python -m benchmarks`."""

from shared.cli import run

from .app import app

run(app)
