"""A target is checked: in this process, or in one of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import console
from ..importing import first_on_path, show_theirs
from ..invariants import (
    Report,
    UnusableModel,
    check_model,
    check_scorer,
    influence,
    save_map,
)
from ..invariants.ranks import first, together
from ..processes import run_alone
from ..targets import (
    load_makers,
    load_scorer,
    load_target,
    needed_arguments,
)
from .kept import Asked, keep, watched

MAP_LENGTH = 32


@dataclass(frozen=True)
class Job:
    """One target to check; plain data, so that another process can read it."""

    target: str
    settings: dict[str, Any]  # arguments of check_model or check_scorer
    map_file: Path | None = None
    cache: str | None = None  # the target that makes one
    # targets that make arguments, by the names of these, or "never"
    inputs: dict[str, str] = field(default_factory=dict)
    documents: str | int | None = None  # a target, an id or an argument's name
    scorer: str | None = None  # the target that makes one, if no model is
    asked: Asked | None = None  # under which its result is kept, if at all


def check_here(job: Job, tell: Callable[[Report], None]) -> Report:
    """Check a target in this process.

    Args:
        job: the target, and how to check it.
        tell: called with the report as it grows.

    Raises:
        ValueError: for a model that cannot be built, called or read, and for
            one that ends the program. Its traceback is printed first.
    """
    if job.asked is None:
        return _check(job, tell)
    with watched(job.asked) as seen:
        report = _check(job, tell)
    keep(job.asked, report, seen)
    return report


def _check(job: Job, tell: Callable[[Report], None]) -> Report:
    settings, here = job.settings, Path.cwd()

    def named(report: Report) -> None:
        report.model = job.target
        tell(report)

    factory = None
    try:
        if job.scorer:
            factory, settings = load_scorer(job.scorer, settings)
            with first_on_path(here):
                return check_scorer(factory, **settings, on_progress=named)
        sizes = settings["vocab_size"], settings["block_size"]
        with together(f"loading {job.target}"):
            factory = load_target(job.target, *sizes)
        with first_on_path(here):
            made = load_makers(job.cache, job.inputs, job.documents)
            report = check_model(
                factory, **settings, **made, on_progress=named
            )
            if job.map_file is not None and not report.interrupted:
                _draw(factory, report, job)
    except UnusableModel as error:
        if error.__cause__ is not None:
            show_theirs(error.__cause__)
        raise ValueError(f"{error}{needed_arguments(factory)}") from None
    except SystemExit as error:
        show_theirs(error)
        raise ValueError(
            f"{job.target} ends the program: SystemExit: {error.code}"
        ) from None
    return report


def check_alone(job: Job, tell: Callable[[Report], None]) -> Report:
    """Check a target in a new process, as `check_here` does.

    So nothing that its code sets for the whole process reaches another
    target.

    Raises:
        ValueError: as `check_here`, and where the process ends early.
    """
    report = run_alone(
        partial(check_here, job), tell, job.target, module=__name__
    )
    assert isinstance(report, Report)
    return report


def _draw(factory: Callable[..., Any], report: Report, job: Job) -> None:
    assert job.map_file is not None
    length = min(MAP_LENGTH, report.block_size)
    names = ("seed", "device", "layout", "outputs")
    how = {name: job.settings[name] for name in names}
    generator = torch.Generator().manual_seed(how["seed"])
    tokens = torch.randint(report.vocab_size, (length,), generator=generator)
    matrix = influence(factory, tokens, vocab_size=report.vocab_size, **how)
    if not first():
        return
    try:
        save_map(matrix, job.map_file, f"influence in {report.model}")
    except OSError as error:
        console.warn(f"no map: {error}")
