"""Run the command as `python -m gpt_duet.cli`."""

from . import main

# false in the process that checks a target, which imports this file
if __name__ == "__main__":
    main()
