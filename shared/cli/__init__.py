"""The command gpt-duet: one module for each of its subcommands.

    options.py         the options that several of them have
    choices.py         what those options choose: text, config, weights
    train_loop.py      the loop of train, and how it is resumed
    job.py             a target of check: the shell's options and a project's
    kept.py            results of check, kept for the next run

Messages are console.py's. A subcommand's module does not
import torch: it does so once its options are parsed, so that --help and a
mistyped option are answered at once.
"""

import io
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from ..console import fail, run, stopped_by_ctrl_c
from ..files import release_stdout
from ..processes import several

COMMANDS = (
    "check", "compare", "diff", "record", "train", "ladder", "generate",
    "convert", "bench", "tokenizers",
)  # fmt: skip
# under torchrun; train joins its processes itself
TOGETHER = ("check", "diff")
# the benchmarks have a manual of their own
PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"gpt-duet {version('gpt-duet')}")
        raise typer.Exit
    return wanted


def _gpt_duet(
    version_wanted: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """One GPT decoder written twice, and checks for any language model."""


def _in_all_processes(function: Callable[..., None]) -> Callable[..., None]:
    """Run a command in each process, where torchrun started several."""

    @wraps(function)
    def run(**options: Any) -> None:
        if not several():
            return function(**options)
        from .several import all_processes

        with all_processes(options.get("device", "cpu")):
            return function(**options)

    return run


def build_app() -> typer.Typer:
    """Return the command with all its subcommands."""
    app = typer.Typer(
        name="gpt-duet",
        no_args_is_help=True,
        rich_markup_mode=None,  # its tables are too narrow for descriptions
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_gpt_duet)
    for name in COMMANDS:
        function = getattr(import_module(f".{name}", __package__), name)
        if name in TOGETHER:
            function = _in_all_processes(function)
        function = stopped_by_ctrl_c()(function)
        if name == "bench":
            app.command(name, add_help_option=False,
                        context_settings=PASSED_ON)(function)  # fmt: skip
        else:
            app.command(name)(function)
    return app


def _answer(app: typer.Typer) -> NoReturn:
    """Run the command; a mistyped option ends in one line, as all mistakes."""
    usage: Any = typer.BadParameter.__base__  # of click, or typer's own of it
    try:
        sys.exit(app(standalone_mode=False))
    except usage as error:
        text = error.format_message()
        if "\n" in text:  # the help, where no command is named
            print(text, file=sys.stderr)
            sys.exit(2)
        path = error.ctx.command_path if error.ctx else "gpt-duet"
        fail(f"{text.rstrip('.')}; {path} -h lists what there is")


class _Unread(io.FileIO):
    """The standard output, also where its reader has gone, such as head."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(content)


def main() -> None:
    """Run gpt-duet; a user's style may lie in the current folder."""
    here, before = os.getcwd(), sys.stdout
    if type(sys.stdout) is io.TextIOWrapper and not sys.stdout.isatty():
        raw = _Unread(sys.stdout.fileno(), "w", closefd=False)
        encoding = sys.stdout.encoding
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may be ASCII
            stream.reconfigure(errors="backslashreplace")
    sys.path.append(here)
    try:
        run(lambda: _answer(build_app()))
    finally:
        release_stdout()
        if here in sys.path:  # a model's module may have changed it
            sys.path.remove(here)
        sys.stdout.flush()
        sys.stdout = before
