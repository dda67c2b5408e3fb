"""Runs the benchmarks, as gpt-duet bench does."""

from shared.console import run

from .app import main

run(main)
