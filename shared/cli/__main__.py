"""Runs the command as `python -m shared.cli`."""

from . import main

main()
