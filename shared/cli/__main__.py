"""Runs the command as `python -m gpt_duet.cli`."""

from . import main

main()
