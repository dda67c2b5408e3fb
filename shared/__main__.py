"""Run the command as `python -m gpt_duet`, for example with torchrun."""

from .cli import main

# false in the process that checks a target, which imports this file
if __name__ == "__main__":
    main()
