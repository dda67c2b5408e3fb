"""Build the command gpt-duet, with one module for each subcommand.

    options.py         options that several subcommands share
    choices.py         the text, config and weights that options choose
    train_loop.py      the loop of train, which can be resumed
    job.py             targets of check, from the shell and pyproject.toml
    kept.py            results of check, stored for the next run

console.py prints messages. A subcommand's module imports torch only after its
options are parsed, so that --help and errors in options are fast.
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
    "convert", "bench", "tokenizers", "agents",
)  # fmt: skip
# commands that run jointly in the processes of torchrun; train is not among
# them, because it joins the processes itself
TOGETHER = ("check", "diff")
# settings of bench, whose options and help are those of benchmarks/app.py
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
    """Run a command in each process if torchrun started several."""

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
        # plain help: in rich's tables the descriptions are too narrow
        rich_markup_mode=None,
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
    """Run the command; report a mistyped option in one line."""
    # the class of usage errors: click's, or typer's own copy
    usage: Any = typer.BadParameter.__base__
    try:
        sys.exit(app(standalone_mode=False))
    except usage as error:
        text = error.format_message()
        if "\n" in text:  # no command was given: the text is the help
            print(text, file=sys.stderr)
            sys.exit(2)
        path = error.ctx.command_path if error.ctx else "gpt-duet"
        fail(f"{text.rstrip('.')}; {path} -h lists the options")


class _Unread(io.FileIO):
    """Standard output, whose reader may end early, as head does."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(content)


def main() -> None:
    """Run gpt-duet, and let styles be imported from the current folder."""
    here, before = os.getcwd(), sys.stdout
    if type(sys.stdout) is io.TextIOWrapper and not sys.stdout.isatty():
        raw = _Unread(sys.stdout.fileno(), "w", closefd=False)
        encoding = sys.stdout.encoding
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding)
    for stream in (sys.stdout, sys.stderr):
        # so that characters which an ASCII terminal lacks are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.path.append(here)
    try:
        run(lambda: _answer(build_app()))
    finally:
        release_stdout()
        if here in sys.path:  # not if a model's module has removed it
            sys.path.remove(here)
        sys.stdout.flush()
        sys.stdout = before
