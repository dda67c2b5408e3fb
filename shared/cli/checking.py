"""A target is loaded, built and checked in this process."""

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
from .job import Job
from .kept import entry_of

MAP_LENGTH = 32


def settings_of(job: Job) -> dict[str, Any]:
    """Return the arguments of check_model or check_scorer, without makers.

    Raises:
        ValueError: for checks or a device that there are not.
    """
    settings = dict(job.settings)
    if job.scorer:
        return settings
    left_out = choose_checks(settings.pop("skip", ()))
    chosen = choose_checks(settings.pop("only", None) or None)
    settings["checks"] = [name for name in chosen if name not in left_out]
    if not settings["checks"]:
        raise ValueError("no check is left to run")
    settings["device"] = choose_device(settings["device"])
    settings["expected_failures"] = full_names(settings["expected_failures"])
    return settings


def check_here(
    job: Job, fresh: bool, tell: Callable[[Report], None]
) -> Report:
    """Check a target in this process.

    Args:
        job: the target, and how to check it.
        fresh: whether to run it though its result is kept.
        tell: called with the report as it grows.

    Raises:
        ValueError: for a model that cannot be built, called or read, and for
            one that ends the program. Its traceback is printed first.
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
                words += f"; a factory takes no arguments: {call} needs "
                words += " and ".join(needed)
            raise ValueError(words) from error.__cause__
    if entry:
        entry.keep(report)
    return report


def load(job: Job, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what makes the model or the scorer, and its settings, loaded."""
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
    length = min(MAP_LENGTH, report.block_size)
    names = ("seed", "device", "layout", "outputs")
    how = {name: settings[name] for name in names}
    how |= {"vocab_size": report.vocab_size, "block_size": length}
    matrix = influence(factory, **how)
    if not first():
        return
    try:
        save_map(matrix, file, f"influence in {report.model}")
    except OSError as error:
        console.warn(f"no map: {error}")
