"""What commands say to their user: messages on stderr, and how they end."""

import sys
from typing import Never

import torch
import typer


def warn(message: str) -> None:
    """Print one line on stderr in the command's name."""
    line = " ".join(message.split())
    print(f"gpt-duet: {line}", file=sys.stderr)


def fail(message: str) -> Never:
    """Print one line on stderr and end with status 2."""
    warn(message)
    sys.exit(2)


def run(command: typer.Typer) -> None:
    """Run a command; a user's mistake ends in one line and status 2."""
    try:
        command()
    except (ValueError, OSError, MemoryError) as error:
        fail(str(error) or type(error).__name__)
    except RuntimeError as error:
        out = isinstance(error, torch.OutOfMemoryError)
        if not out and "can't allocate memory" not in str(error):
            raise
        fail(f"not enough memory: {error}")
