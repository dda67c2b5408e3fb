"""gpt-duet check: check the invariants of any model."""

import locale
import os
from collections.abc import Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ..console import printable, warn
from ..files import STDOUT, reserve_stdout, write_json
from ..invariants.report import BAD, ORIGIN
from ..notebooks import progress
from ..processes import run_alone, several
from ..validation import require_parent
from . import formats, options
from .job import Job, jobs_of

if TYPE_CHECKING:  # for annotations only: --help must be fast
    from tqdm import tqdm

    from ..invariants import CheckResult, Report

COLOURS = {  # by status: the colour of the word in the table
    "passed": "green",
    "failed": "red",
    "error": "red",
    "skipped": "yellow",
    "expected": "magenta",
}
Texts = list[str] | None
# seconds without output after which a warning says that a model is slow
SILENCE = 10.0
# ASCII characters for terminals that lack the shades of a map.
ASCII = {0xB7: ".", **dict.fromkeys((0x2591, 0x2592, 0x2593, 0x2588), "#")}


def _list(wanted: bool) -> bool:
    if wanted:
        from ..invariants import CHECKS

        width = max(map(len, CHECKS))
        for name, one in CHECKS.items():
            only = f" Slow: --only {name.removeprefix('check_')}."
            print(f"{name:<{width}}  {one.says}{only if one.slow else ''}")
        raise typer.Exit
    return wanted


@options.with_settings(show_list="compile")
def check(
    context: typer.Context,
    models: Annotated[Texts, Argument(
        help="The models, each as package.module:factory, "
        "path/to/file.py:factory, an expression instead of the factory, a "
        "package with build_model(config), such as annotated, or "
        "exec:COMMAND, a program in any language. Default: the "
        "targets of [tool.gpt-duet] in pyproject.toml.")] = None,
    show_list: Annotated[bool, Option("--list", callback=_list, is_eager=True,
        help="List the checks without running them.")] = False,
    json_file: options.Json = None,
    form: Annotated[Literal["text", "github", "sarif"], Option("--format",
        help="github: also write annotations for a workflow, and the step's "
        "summary; sarif: write SARIF to the standard output, and everything "
        "else to the standard error.")] = "text",
    verbose: Annotated[bool, Option("--verbose", "-v",
        help="Show the whole message of checks that passed, also in a "
        "terminal.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q",
        help="Show only failures.")] = False,
    fresh: Annotated[bool, Option("--fresh",
        help="Ignore the results in .gpt_duet_cache, which are those of "
        "models that passed with the same files, settings and versions.",
        )] = False,
    map_file: Annotated[Path | None, Option("--map",
        help="Draw which token influences which position, in a .png or .html "
        "file.")] = None,
    debug: options.Debug = False,
    # all other settings are in shared/settings.py, which Python also reads
    **settings: Any,
) -> None:  # fmt: skip
    """Check that models do not see future tokens, and other invariants.

    The exit status is 0 if no check failed, 1 if a check failed, 2 if the
    command is wrong or a model cannot be checked, and 130 after Ctrl-C.
    """
    if form == "sarif":
        reserve_stdout()
    require_parent(json_file)
    if json_file not in (None, STDOUT):
        # absolute, because a model may change the current folder
        json_file = json_file.absolute()
    console = Console(stderr=json_file == STDOUT or form == "sarif")
    shown = Shown(console, console.is_terminal and not verbose, quiet)
    try:
        if verbose and quiet:
            raise ValueError("--verbose and --quiet: choose one")
        if json_file == STDOUT and form == "sarif":
            raise ValueError("--json - and --format sarif: choose one")
        require_parent(map_file)
        if map_file and map_file.suffix not in (".png", ".html"):
            raise ValueError(
                f"--map takes a .png or .html file, got {map_file.name}"
            )
        jobs = jobs_of(context)
        with chdir(jobs[0].folder):
            results, status = _check_all(jobs, fresh, shown)
    except ValueError as error:
        wrong = {"ok": False} | _wrong(error)
        named = models or [settings["scorer"] or "pyproject.toml"]
        each = [{"model": name} | wrong for name in named]
        _write(json_file, form, each, wrong)
        raise
    _write(json_file, form, results, {"ok": status == 0})
    if status:
        raise typer.Exit(status)


class Shown:
    """Prints reports, each row as soon as the row's check ends.

    Args:
        console: where to print.
        brief: whether to shorten the messages of passed checks.
        quiet: whether to print only failures.
    """

    def __init__(self, console: Console, brief: bool, quiet: bool):
        self.console, self.brief, self.quiet = console, brief, quiet

    def row(self, report: "Report") -> None:
        """Print the newest row, or the heading before the first."""
        width = self.console.width
        if self.quiet:
            return
        if report.interim:
            warn(report.interim)
        elif report.results:
            self.print_row(report, report.results[-1], self.brief)
        else:
            self.print(report.heading(width))

    def grow(self, report: "Report", line: "tqdm[Any]", slow: Timer) -> None:
        """Print the newest row; below it, print the running check's name."""
        slow.cancel()
        line.set_description_str(report.under_way, refresh=False)
        with line.external_write_mode():
            self.row(report)

    def end(self, report: "Report", map_file: Path | None) -> None:
        """Print the end of a report; with `quiet`, also print the failures."""
        if not self.quiet:
            self.print(report.ending(self.console.width))
        elif not report.ok:
            width = self.console.width
            self.print(report.heading(width))
            for result in report.results:
                if result.status in BAD:
                    self.print_row(report, result)
            self.print(report.ending(width))
        if not report.interrupted and (map_file or not self.quiet):
            self.print(f"map: {map_file}\n" if map_file else "")

    def print_row(
        self, report: "Report", result: "CheckResult", brief: bool = False
    ) -> None:
        """Print a check's row, with the status in colour."""
        start, status, end = report.cells(result, self.console.width, brief)
        self.print(start, (status, COLOURS[status]), end)

    def print(self, *parts: str | tuple[str, str]) -> None:
        """Print parts of a text: strings, or pairs (string, colour)."""
        encodings = f"{self.console.encoding} {locale.getencoding()}"
        plain = encodings.lower().count("utf") < 2
        whole = Text()
        for part in parts:
            text, colour = (part, "") if isinstance(part, str) else part
            text = text.translate(ASCII) if plain else text
            whole.append(printable(text), colour)
        self.console.print(whole, soft_wrap=True)


def _check_all(
    jobs: Sequence[Job], fresh: bool, shown: Shown
) -> tuple[list[dict[str, Any]], int]:
    """Check all targets; return their results and the exit status.

    If a target cannot be checked, the others are still checked.
    """
    from .checking import check_here, settings_of

    for job in jobs:
        settings_of(job)
    # with several targets, check each in its own process
    apart = len(jobs) > 1 and not several()
    results: list[dict[str, Any]] = []
    status = 0
    try:
        for job in jobs:
            words = f"{job.target} is slow to build or call"
            slow = Timer(SILENCE, warn, [words])
            slow.start()
            try:
                with progress() as line:
                    tell = partial(shown.grow, line=line, slow=slow)
                    work = partial(check_here, job, fresh)
                    if apart:
                        room = check_here.__module__
                        report = run_alone(work, tell, job.target, room)
                    else:
                        report = work(tell)
            except ValueError as error:
                if len(jobs) == 1:
                    raise
                warn(str(error))
                wrong = {"model": job.target, "ok": False}
                results.append(wrong | _wrong(error))
                status = 2
                continue
            finally:
                slow.cancel()
            results.append(report.to_dict())
            shown.end(report, job.map_file)
            status = max(status, int(not report.ok))
            if report.interrupted:
                return results, 130
    except KeyboardInterrupt:  # while a model is built or a map is drawn
        status = 130
    return results, status


def _wrong(error: ValueError) -> dict[str, Any]:
    """Return the JSON fields of a target that could not be checked."""
    return {"error": str(error), "places": getattr(error, "places", [])}


def _write(
    file: Path | None,
    form: str,
    models: Sequence[dict[str, Any]],
    whole: dict[str, Any],
) -> None:
    """Write all results, if this is the first process of several.

    `models` has the fields of each model; `whole` has all other fields.
    """
    if several() and os.environ["RANK"] != "0":
        return
    if form == "github":
        formats.write_summary(models)
        for line in formats.annotations(models):
            print(line)
    if form == "sarif" and file != STDOUT:
        write_json(STDOUT, formats.sarif(models))
    if file is not None:
        write_json(file, ORIGIN | whole | {"models": models})
