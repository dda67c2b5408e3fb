"""gpt-duet check: the invariants, for anyone's model."""

import locale
import os
from collections.abc import Sequence
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

if TYPE_CHECKING:  # imported where it is used: --help need not wait for it
    from tqdm import tqdm

    from ..invariants import CheckResult, Report

COLOURS = {  # of each status
    "passed": "green",
    "failed": "red",
    "error": "red",
    "skipped": "yellow",
    "expected": "magenta",
}
Texts = list[str] | None
SILENCE = 10.0  # seconds until the first line, at most
# The shades of a map, where the terminal has no others.
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
        help="What builds each model: package.module:factory, "
        "path/to/file.py:factory, an expression in place of the factory, a "
        "package with build_model(config), such as annotated, or "
        "exec:COMMAND, a program in any language. Default: the "
        "targets of [tool.gpt-duet] in pyproject.toml.")] = None,
    show_list: Annotated[bool, Option("--list", callback=_list, is_eager=True,
        help="List the checks, and run none.")] = False,
    json_file: options.Json = None,
    form: Annotated[Literal["text", "github", "sarif"], Option("--format",
        help="github: also write annotations for a workflow, and the step's "
        "summary; sarif: write SARIF to the standard output, and all else to "
        "the standard error.")] = "text",
    verbose: Annotated[bool, Option("--verbose", "-v",
        help="In a terminal, too, show all that a check says that passed.",
        )] = False,
    quiet: Annotated[bool, Option("--quiet", "-q",
        help="Show failures alone.")] = False,
    fresh: Annotated[bool, Option("--fresh",
        help="Run anew what passed in an earlier run of the same files, "
        "settings and versions, whose result is kept in .gpt_duet_cache.",
        )] = False,
    map_file: Annotated[Path | None, Option("--map",
        help="Draw which token influences which position, in a .png or .html "
        "file.")] = None,
    debug: options.Debug = False,
    **settings: Any,
) -> None:  # fmt: skip
    """Check that models do not see future tokens, and much else.

    The exit status is 0 if everything holds, 1 if a check failed, 2 if the
    call was wrong, and 130 after Ctrl-C.
    """
    if form == "sarif":
        reserve_stdout()
    require_parent(json_file)
    if json_file not in (None, STDOUT):
        json_file = json_file.absolute()  # a model may change the folder
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
                f"a map ends in .png or .html, got {map_file.name}"
            )
        results, status = _check_all(jobs_of(context), fresh, shown)
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
    """Prints reports, each row as soon as its check ends."""

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
        """Print the newest row, and below it the check under way."""
        slow.cancel()
        line.set_description_str(report.under_way, refresh=False)
        with line.external_write_mode():
            self.row(report)

    def end(self, report: "Report", map_file: Path | None) -> None:
        """Print what stands below the rows; if quiet, failures alone."""
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
        """Print the row of a check, its status in colour."""
        start, status, end = report.cells(result, self.console.width, brief)
        self.print(start, (status, COLOURS[status]), end)

    def print(self, *parts: str | tuple[str, str]) -> None:
        """Print parts of a text; a part with a colour is a pair."""
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
    """Return the results of all targets, and the exit status.

    One target that cannot be checked does not lose the others' results.
    """
    from .checking import check_here, settings_of

    for job in jobs:
        settings_of(job)
    # so nothing that a target sets for its process reaches the next one
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
    except KeyboardInterrupt:  # while a model was built, or a map drawn
        status = 130
    return results, status


def _wrong(error: ValueError) -> dict[str, Any]:
    """Return what a target's JSON says that could not be checked."""
    return {"error": str(error), "places": getattr(error, "places", [])}


def _write(
    file: Path | None,
    form: str,
    models: Sequence[dict[str, Any]],
    whole: dict[str, Any],
) -> None:
    """Write all results, from the first process alone.

    The JSON has fields for the models as a whole, and for each of them.
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
