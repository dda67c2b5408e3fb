"""Load, build and check a target in this process."""

from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from typing import Any

from .. import console
from ..importing import theirs_shown
from ..invariants import (
    Report,
    UnusableModel,
    check_model,
    influence,
    save_map,
)
from ..invariants.runner import choose_checks, full_names
from ..running.ranks import first, together
from ..scoring import check_scorer
from ..targets import load_makers, load_target, needed_arguments
from ..validation import choose_device
from ..visibility import name_of, takes_tokens
from .job import Job
from .kept import entry_of

MAP_LENGTH = 32


def settings_of(job: Job) -> dict[str, Any]:
    """Return arguments for check_model or check_scorer; functions are names.

    Raises:
        ValueError: for a check or a device that does not exist.
    """
    settings = dict(job.settings)
    if job.scorer:
        return settings
    left_out = choose_checks(settings.pop("skip", ()))
    chosen = choose_checks(settings.pop("only", None) or None)
    settings["checks"] = [name for name in chosen if name not in left_out]
    if not settings["checks"]:
        raise ValueError("no check to run: --skip leaves out every check")
    settings["device"] = choose_device(settings["device"])
    settings["expected_failures"] = full_names(settings["expected_failures"])
    return settings


def check_here(
    job: Job, fresh: bool, tell: Callable[[Report], None]
) -> Report:
    """Check a target in this process.

    Args:
        job: the target, and how to check it.
        fresh: whether to ignore a result kept from an earlier run.
        tell: a function that gets the report as it grows.

    Raises:
        ValueError: if the model cannot be built, called or read, or if it ends
            the program. Before that, the model's traceback is printed.
    """

    def named(report: Report) -> None:
        report.model = job.target
        tell(report)

    here, run = Path.cwd(), check_scorer if job.scorer else check_model
    with theirs_shown():
        factory, settings = load(job, settings_of(job))
        entry = entry_of(job, factory)
        if entry and not fresh and (report := entry.find()):
            for count in range(len(report.results) + 1):
                tell(replace(report, results=report.results[:count]))
            return report
        try:
            report = run(factory, **settings, on_progress=named)
            if job.map_file is not None and not report.interrupted:
                _draw(factory, report, here / job.map_file, settings)
        except UnusableModel as error:
            words = str(error)
            if isfunction(factory) and (needed := needed_arguments(factory)):
                call = f"{factory.__name__}({', '.join(needed)})"
                words += f"; a factory takes no arguments: {call} requires "
                words += " and ".join(needed)
            raise ValueError(words) from error.__cause__
    if entry:
        entry.keep(report)
    return report


def load(job: Job, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load a job's target, and the functions that its settings name."""
    sizes = settings.get("vocab_size"), settings.get("block_size")
    with together(f"loading {job.target}"):
        factory = load_target(job.scorer or job.target, *sizes)
    return factory, load_makers(settings)


def _draw(
    factory: Callable[..., Any],
    report: Report,
    file: Path,
    settings: dict[str, Any],
) -> None:
    sees = settings.get("sees")
    if sees is not None and takes_tokens(sees):
        console.warn(f"no map: {name_of(sees)} depends on the tokens")
        return
    length = min(MAP_LENGTH, report.block_size)
    names = ("seed", "device", "layout", "outputs")
    how = {name: settings[name] for name in names}
    how |= {"vocab_size": report.vocab_size, "block_size": length}
    matrix = influence(factory, **how)
    if not first():
        return
    try:
        save_map(matrix, file, f"influence in {report.model}", sees)
    except OSError as error:
        console.warn(f"no map: {error}")
