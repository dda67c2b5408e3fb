"""Runs the command as `python -m gpt_duet`: for torchrun, say."""

from .cli import main

main()
