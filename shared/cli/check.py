"""gpt-duet check: the invariants, for anyone's model."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..console import progress, warn
from ..files import write_json
from ..invariants import (
    Report,
    UnusableModel,
    check_model,
    influence,
    save_map,
)
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


def check(
    models: Annotated[
        list[str],
        typer.Argument(
            help="What builds each model: package.module:factory, "
            "path/to/file.py:factory, or a package with "
            "build_model(config), such as annotated.",
            show_default=False,
        ),
    ],
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
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run this check only; may be repeated."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Leave this check out; may be repeated."),
    ] = None,
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    json_file: options.Json = None,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="Draw which token influences which position, in a .png or "
            ".html file.",
        ),
    ] = None,
) -> None:
    """Check that models do not see future tokens, and much else.

    The exit status is 0 if everything holds, 1 if a check failed, and 2 if
    the call was wrong.
    """
    names = choose_checks(only)
    left_out = set(choose_checks(skip or []))
    names = [name for name in names if name not in left_out]
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

    console = Console()
    reports: list[Report] = []
    interrupted = False
    for target in models:
        factory = load_target(target, vocab_size, block_size)
        report = _check_one(
            factory,
            checks=names,
            vocab_size=vocab_size,
            block_size=block_size,
            seed=seed,
            device=device,
        )
        report.model = target
        reports.append(report)
        colour = console.color_system is not None and not console.no_color
        print(report.table(console.width, colour))
        if report.interrupted:
            interrupted = True
            break
        if map_file is not None:
            path = _map_path(map_file, target, len(models))
            _draw(factory, report, seed, path)
            console.print(f"map: {path}", soft_wrap=True)
        console.print()
    if json_file is not None:
        content = {
            "ok": all(report.ok for report in reports),
            "models": [report.to_dict() for report in reports],
        }
        write_json(json_file, content)
    if interrupted:
        raise typer.Exit(130)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _check_one(factory: Callable[..., Any], **settings: Any) -> Report:
    """Run the checks; an exception of the user's is printed as theirs."""
    names = settings["checks"]
    with progress(Console(stderr=True), len(names)) as show:
        # the number of checks that are done, and the one that runs next
        coming = enumerate([*names[1:], ""], start=1)
        show(0, names[0])
        try:
            with first_on_path(Path.cwd()):
                return check_model(
                    factory,
                    on_result=lambda result: show(*next(coming)),
                    **settings,
                )
        except UnusableModel as error:
            if error.__cause__ is not None:
                show_theirs(error.__cause__)
            raise ValueError(str(error)) from None


def _draw(
    factory: Callable[..., Any], report: Report, seed: int, path: Path
) -> None:
    length = min(MAP_LENGTH, report.block_size)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(report.vocab_size, (length,), generator=generator)
    with first_on_path(Path.cwd()):
        matrix = influence(
            factory, tokens, vocab_size=report.vocab_size, seed=seed
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
