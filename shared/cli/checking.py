"""The checks on models that are named by text, printed as they end."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ..console import warn
from ..files import STDOUT, write_json
from ..importing import first_on_path, show_theirs
from ..invariants import (
    CHECKS,
    Report,
    UnusableModel,
    check_model,
    influence,
    save_map,
)
from ..invariants.checks import SLOW
from ..invariants.runner import choose_checks
from ..targets import load_target

MAP_LENGTH = 32
# The colour of each status: groups are named for it.
STATUS = (
    r"(?m)^check_\w+ +((?P<green>passed)|(?P<red>failed|error)|"
    r"(?P<yellow>skipped)|(?P<magenta>expected))"
)
PATIENCE = 20.0  # seconds; a check that takes longer is announced


def check_targets(
    models: Sequence[str],
    only: Collection[str] | None,
    skip: Collection[str],
    json_file: Path | None,
    map_file: Path | None,
    *,
    vocab_size: int | None,
    block_size: int | None,
    **settings: Any,
) -> int:
    """Check each model, print and write what is found: the exit status.

    The settings are those of check_model.
    """
    left_out = choose_checks(skip)
    names = [name for name in choose_checks(only) if name not in left_out]
    if not names:
        raise ValueError("no check is left to run")
    console = Console(stderr=json_file == STDOUT)
    reports: list[Report] = []
    stopped = False
    settings |= {"vocab_size": vocab_size, "block_size": block_size}
    try:
        for target in models:
            factory = load_target(target, vocab_size, block_size)
            show = partial(_show, console, target, reports)
            try:
                with first_on_path(Path.cwd()):
                    report = check_model(
                        factory, checks=names, on_progress=show, **settings
                    )
            except UnusableModel as error:
                if error.__cause__ is not None:
                    show_theirs(error.__cause__)
                raise ValueError(str(error)) from None
            _print(console, report.ending(console.width))
            if stopped := report.interrupted:
                break
            if map_file is not None:
                path = _map_path(map_file, target, len(models))
                _draw(factory, report, path, settings)
                _print(console, f"map: {path}")
            _print(console, "")
    except KeyboardInterrupt:  # while a model was built, or a map drawn
        stopped = True
    ok = not stopped and all(report.ok for report in reports)
    if json_file is not None:
        results = [report.to_dict() for report in reports]
        write_json(json_file, {"ok": ok, "models": results})
    return 130 if stopped else int(not ok)


def list_checks() -> None:
    """Print a line for each check; the slow ones are run when named."""
    width = max(map(len, CHECKS))
    for name, function in CHECKS.items():
        line = (inspect.getdoc(function) or "").split("\n")[0]
        if name in SLOW:
            line += f" Slow: --only {name.removeprefix('check_')}."
        print(f"{name:<{width}}  {line}")


def _show(
    console: Console, target: str, reports: list[Report], report: Report
) -> None:
    """Print what has just become known of a report."""
    if report.interim:
        return warn(report.interim)
    if report.results:
        _print(console, report.row(report.results[-1], console.width))
    else:
        report.model = target
        reports.append(report)
        _print(console, report.heading(console.width))
    for name in report.asked[len(report.results) :][:1]:
        seconds = report.estimates[name]
        if seconds > PATIENCE and not report.plan:
            warn(f"{name} takes about {seconds:.0f} s")


def _print(console: Console, text: str) -> None:
    shown = Text(text)
    shown.highlight_regex(STATUS)
    console.print(shown, soft_wrap=True)


def _draw(
    factory: Callable[..., Any],
    report: Report,
    path: Path,
    settings: Mapping[str, Any],
) -> None:
    seed, length = settings["seed"], min(MAP_LENGTH, report.block_size)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(report.vocab_size, (length,), generator=generator)
    with first_on_path(Path.cwd()):
        matrix = influence(
            factory,
            tokens,
            vocab_size=report.vocab_size,
            seed=seed,
            layout=settings["layout"],
        )
    try:
        save_map(matrix, path, f"influence in {report.model}")
    except OSError as error:
        warn(f"no map: {error}")


def _map_path(path: Path, target: str, count: int) -> Path:
    """Return a file for each model, where there are several."""
    if count == 1:
        return path
    word = "".join(c if c.isalnum() else "-" for c in target).strip("-")
    return path.with_name(f"{path.stem}-{word}{path.suffix}")
