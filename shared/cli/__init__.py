"""The command gpt-duet: one module for each of its subcommands.

    options.py        the options that several of them have
    choices.py        what those options choose: text, config, weights
    training_loop.py  the loop of train: progress, checkpoints, stopping

Messages and progress bars are console.py's.
"""

import io
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import run
from . import (
    bench,
    check,
    compare,
    convert,
    diff,
    generate,
    ladder,
    tokenizers,
    train,
)

app = typer.Typer(
    name="gpt-duet",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"gpt-duet {version('gpt-duet')}")
        raise typer.Exit
    return asked


@app.callback()
def gpt_duet(
    asked: Annotated[
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


app.command("check")(check.check)
app.command("compare")(compare.compare)
app.command("diff")(diff.diff)
app.command("train")(train.train)
app.command("ladder")(ladder.ladder)
app.command("generate")(generate.generate)
app.command("convert")(convert.convert)
app.command(
    "bench",
    add_help_option=False,  # the benchmarks have a manual of their own
    context_settings={
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)(bench.bench)
app.command("tokenizers")(tokenizers.tokenizers)


class _Unread(io.FileIO):
    """The standard output, also where its reader has gone, such as head."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(content)


def main() -> None:
    """Run gpt-duet; a user's style may lie in the current folder."""
    here = os.getcwd()
    if type(sys.stdout) is io.TextIOWrapper and not sys.stdout.isatty():
        raw = _Unread(sys.stdout.fileno(), "w", closefd=False)
        encoding = sys.stdout.encoding
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may be ASCII
            stream.reconfigure(errors="backslashreplace")
    # the kit's own packages, too: an empty folder of their name hides none
    added = [str(Path(__file__).resolve().parents[2]), here]
    sys.path += added
    try:
        run(app)
    finally:
        for folder in added:
            sys.path.remove(folder)
