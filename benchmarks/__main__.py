"""Run the benchmarks, as gpt-duet bench does."""

from gpt_duet.console import run

from .app import main

run(main)
