"""Messages of the commands to their user: facts, errors, exit status."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

from rich.console import Console
from rich.table import Table
from rich.text import Text

CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")  # but for \t and \n

debug = False  # whether tracebacks are shown whole


class MistakeAt(ValueError):
    """A user's mistake, and the lines of theirs that it is about.

    Attributes:
        places: each has a file and a line.
    """

    def __init__(
        self, message: str, places: Sequence[dict[str, Any]] = ()
    ) -> None:
        super().__init__(message)
        self.places = list(places)


def set_debug(value: bool) -> bool:
    """Show tracebacks whole from now on, or no longer."""
    global debug
    debug = value
    return value


def printable(text: str) -> str:
    """Return a text whose control characters are spelled out.

    A name may hold codes that move a terminal's cursor or colour it.
    """
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def warn(message: str) -> None:
    """Print one line on stderr in the command's name."""
    line = printable(" ".join(message.split()))
    print(f"gpt-duet: {line}", file=sys.stderr)


def fail(message: str, status: int = 2) -> Never:
    """Print one line on stderr and end the command."""
    warn(message)
    sys.exit(status)


def run(command: Callable[[], object]) -> None:
    """Run a command; a user's mistake ends in one line and status 2."""
    try:
        with stopped_by_ctrl_c(), own_warnings():
            command()
    except (ValueError, OSError, MemoryError) as error:
        if debug:
            raise
        fail(str(error) or type(error).__name__)
    except RuntimeError as error:
        out = type(error).__name__ == "OutOfMemoryError"  # torch's
        if debug or (not out and "can't allocate memory" not in str(error)):
            raise
        fail(f"not enough memory: {error}")


@contextmanager
def stopped_by_ctrl_c() -> Iterator[None]:
    """End in one word and status 130 at Ctrl-C inside.

    A function of typer's needs it as a decorator: typer itself ends with
    that status and without a word.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail("stopped", status=130)


@contextmanager
def own_warnings() -> Iterator[None]:
    """Print the kit's own warnings in one line inside."""
    show = warnings.showwarning

    def showwarning(
        message: Any, category: Any, file: str, *rest: Any
    ) -> None:
        if Path(file).is_relative_to(Path(__file__).parent):
            warn(str(message))
        else:
            show(message, category, file, *rest)

    with warnings.catch_warnings():
        warnings.showwarning = showwarning  # type: ignore[assignment]
        yield


def show_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print a fact a line, each after its name.

    A narrow terminal has further lines, a file has not.
    """
    width = max(map(len, facts)) + 2
    for name, fact in facts.items():
        head = Text(name.ljust(width), "bold cyan")
        text = Text(printable(fact))
        if console.is_terminal:
            table = Table.grid(padding=0)
            table.add_row(head, text)
            console.print(table)
        else:
            console.print(head + text, soft_wrap=True)


def given_options(context: Any) -> dict[str, Any]:
    """Return what the user gave to a command, by option ("--seed")."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":
            found[parameter.opts[0]] = context.params[parameter.name]
    return found
