"""gpt-duet agents: print how a coding agent uses the kit."""

from pathlib import Path

import typer

# file in the installed package, or at the root of a checkout
FILE = "AGENTS.md"


def agents() -> None:
    """Print instructions with which a coding agent can use gpt-duet."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        if (folder / FILE).is_file():
            typer.echo((folder / FILE).read_text("utf-8"), nl=False)
            return
    raise ValueError(f"no {FILE} in {package} or above it: install again")
