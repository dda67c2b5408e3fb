"""gpt-duet check: the invariants, for anyone's model."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from ..console import warn
from ..files import STDOUT, write_json
from ..invariants import (
    CHECKS,
    Report,
    Table,
    UnusableModel,
    check_model,
    influence,
    save_map,
)
from ..invariants.checks import SLOW
from ..invariants.runner import choose_checks
from ..targets import first_on_path, load_target, show_theirs
from ..validation import (
    choose_device,
    require_parent,
    require_seed,
    whole_number,
)
from . import options

MAP_LENGTH = 32
PATIENCE = 20.0  # seconds; a check that takes longer is announced
QUICK = 30.0  # seconds


def check(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="What builds each model: package.module:factory, "
            "path/to/file.py:factory, an expression in place of the factory, "
            "or a package with build_model(config), such as annotated.",
            show_default=False,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Number of tokens. Default: the model's own."),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Longest sequence to try. Default: the model's own."
        ),
    ] = None,
    outputs: Annotated[
        Literal["auto", "logits", "log_probs"],
        typer.Option(help="What the model's scores are."),
    ] = "auto",
    layout: Annotated[
        str,
        typer.Option(
            help="Order of the tokens' axes: bt (batch, time), or tb."
        ),
    ] = "bt",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run this check only; may be repeated."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Leave this check out; may be repeated."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Leave out what takes beyond 30 s."),
    ] = False,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the checks, and run none.")
    ] = False,
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    threads: options.Threads = None,
    json_file: options.Json = None,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="Draw which token influences which position, in a .png or "
            ".html file.",
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Check that models do not see future tokens, and much else.

    The exit status is 0 if everything holds, 1 if a check failed, 2 if the
    call was wrong, and 130 after Ctrl-C.
    """
    if show_list:
        _list_checks()
        return
    if not models:
        raise ValueError("name what builds a model, as my_pkg.model:build")
    left_out = set(choose_checks(skip or []))
    names = [name for name in choose_checks(only) if name not in left_out]
    if not names:
        raise ValueError("no check is left to run")
    for name, size in (("vocab-size", vocab_size), ("block-size", block_size)):
        if size is not None:
            whole_number(f"--{name}", size, at_least=1)
    require_seed(seed)
    require_parent(json_file)
    require_parent(map_file)
    if map_file is not None and map_file.suffix not in (".png", ".html"):
        raise ValueError(f"a map ends in .png or .html, got {map_file.name}")
    device = choose_device(device_name)

    console = Console(stderr=json_file == STDOUT)
    reports: list[Report] = []
    stopped = False
    try:
        for target in models:
            factory = load_target(target, vocab_size, block_size)
            report = _check_one(
                factory,
                on_progress=partial(_show, console, target, reports),
                checks=names,
                vocab_size=vocab_size,
                block_size=block_size,
                outputs=outputs,
                seed=seed,
                device=device,
                layout=layout,
                threads=threads,
                budget=QUICK if quick else None,
                debug=debug,
            )
            _print(console, _table(console, report).ending())
            if stopped := report.interrupted:
                break
            if map_file is not None:
                path = _map_path(map_file, target, len(models))
                _draw(factory, report, seed, path, layout)
                _print(console, f"map: {path}")
            _print(console, "")
    except KeyboardInterrupt:  # while a model was built, or a map drawn
        stopped = True
    ok = not stopped and all(report.ok for report in reports)
    if json_file is not None:
        results = [report.to_dict() for report in reports]
        write_json(json_file, {"ok": ok, "models": results})
    if not ok:
        raise typer.Exit(130 if stopped else 1)


def _list_checks() -> None:
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
    table = _table(console, report)
    if report.results:
        _print(console, table.row(report.results[-1]))
    else:
        report.model = target
        reports.append(report)
        _print(console, table.heading())
    for name in report.asked[len(report.results) :][:1]:
        seconds = report.estimates[name]
        if seconds > PATIENCE:
            warn(f"{name} takes about {seconds:.0f} s")


def _table(console: Console, report: Report) -> Table:
    colour = console.color_system is not None and not console.no_color
    return Table(report, console.width, colour)


def _print(console: Console, text: str) -> None:
    print(text, file=console.file, flush=True)


def _check_one(factory: Callable[..., Any], **settings: Any) -> Report:
    """Run the checks; an exception of the user's is printed as theirs."""
    try:
        with first_on_path(Path.cwd()):
            return check_model(factory, **settings)
    except UnusableModel as error:
        if error.__cause__ is not None:
            show_theirs(error.__cause__)
        raise ValueError(str(error)) from None


def _draw(
    factory: Callable[..., Any],
    report: Report,
    seed: int,
    path: Path,
    layout: str,
) -> None:
    length = min(MAP_LENGTH, report.block_size)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(report.vocab_size, (length,), generator=generator)
    with first_on_path(Path.cwd()):
        matrix = influence(
            factory,
            tokens,
            vocab_size=report.vocab_size,
            seed=seed,
            layout=layout,
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
