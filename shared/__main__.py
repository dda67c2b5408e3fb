"""Runs the command as `python -m gpt_duet`: for torchrun, say."""

from .cli import main

if __name__ == "__main__":  # the process of a target imports this again
    main()
