"""Print messages of commands, report errors, and set the exit status."""

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

CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")  # all but \t and \n

debug = False  # whether to show whole tracebacks


class MistakeAt(ValueError):
    """Raised for a user's mistake, with the lines of the user's code.

    Attributes:
        places: the lines, each with a file and a line number.
    """

    def __init__(
        self, message: str, places: Sequence[dict[str, Any]] = ()
    ) -> None:
        super().__init__(message)
        self.places = list(places)


def set_debug(value: bool) -> bool:
    """Set whether to show whole tracebacks, and return the value."""
    global debug
    debug = value
    return value


def printable(text: str) -> str:
    """Return a text in which control characters are escaped.

    Otherwise they could move the cursor of a terminal or colour the text.
    """
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def warn(message: str) -> None:
    """Print a warning on stderr, as one line that begins with "gpt-duet:"."""
    line = printable(" ".join(message.split()))
    print(f"gpt-duet: {line}", file=sys.stderr)


def fail(message: str, status: int = 2) -> Never:
    """Print one line on stderr, and end the command with this exit status."""
    warn(message)
    sys.exit(status)


def run(command: Callable[[], object]) -> None:
    """Run a command; report a user's mistake in one line, with status 2."""
    try:
        with stopped_by_ctrl_c(), own_warnings():
            command()
    except (ValueError, OSError, MemoryError) as error:
        if debug:
            raise
        fail(str(error) or type(error).__name__)
    except RuntimeError as error:
        out = type(error).__name__ == "OutOfMemoryError"  # torch's class
        if debug or (not out and "can't allocate memory" not in str(error)):
            raise
        fail(f"not enough memory: {error}")


@contextmanager
def stopped_by_ctrl_c() -> Iterator[None]:
    """Print "stopped" on Ctrl-C in the body, and exit with status 130.

    Use it as a decorator for functions of typer, because typer itself exits
    with this status without a message.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail("stopped", status=130)


@contextmanager
def own_warnings() -> Iterator[None]:
    """Print the kit's own warnings in one line each, during the body."""
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
    """Print each fact on a line, after its name.

    A long fact wraps in a terminal, but not in a file.
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
    """Return the values that the user gave, by option ("--seed")."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":
            found[parameter.opts[0]] = context.params[parameter.name]
    return found
