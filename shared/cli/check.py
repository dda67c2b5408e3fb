"""gpt-duet check: the invariants, for anyone's model."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from ..targets import parse_target
from ..validation import (
    choose_device,
    require_parent,
    require_seed,
    whole_number,
)
from . import options

UNITS = {"s": 1, "m": 60, "h": 3600}  # seconds


def check(
    models: Annotated[
        list[str] | None,
        Argument(
            help="What builds each model: package.module:factory, "
            "path/to/file.py:factory, an expression in place of the factory, "
            "or a package with build_model(config), such as annotated.",
            show_default=False,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, Option(help="Number of tokens. Default: the model's own.")
    ] = None,
    block_size: Annotated[
        int | None,
        Option(help="Longest sequence to try. Default: the model's own."),
    ] = None,
    outputs: Annotated[
        Literal["auto", "logits", "log_probs"],
        Option(help="What the model's scores are."),
    ] = "auto",
    layout: Annotated[
        Literal["bt", "tb"],
        Option(help="Order of the tokens' axes: bt (batch, time), or tb."),
    ] = "bt",
    only: Annotated[
        list[str] | None, Option(help="Run this check only; may be repeated.")
    ] = None,
    skip: Annotated[
        list[str] | None, Option(help="Leave this check out; may be repeated.")
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            help="Time there is: 90s, 4m or seconds; what finds most comes "
            "first. Default: 4m where all would take longer.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="The same as --budget 30s.")
    ] = False,
    thorough: Annotated[
        bool, Option("--thorough", help="Try all, however long.")
    ] = False,
    show_list: Annotated[
        bool, Option("--list", help="List the checks, and run none.")
    ] = False,
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    threads: options.Threads = None,
    json_file: options.Json = None,
    map_file: Annotated[
        Path | None,
        Option(
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
    if not models and not show_list:
        raise ValueError("name what builds a model, as my_pkg.model:build")
    for model in models or []:
        parse_target(model)
    for name, size in (("vocab-size", vocab_size), ("block-size", block_size)):
        if size is not None:
            whole_number(f"--{name}", size, at_least=1)
    if thorough + quick + (budget is not None) > 1:
        raise ValueError("--thorough, --quick and --budget: choose one")
    if quick:
        budget = "30s"
    seconds = math.inf if thorough else _seconds(budget)
    require_seed(seed)
    require_parent(json_file)
    require_parent(map_file)
    if map_file is not None and map_file.suffix not in (".png", ".html"):
        raise ValueError(f"a map ends in .png or .html, got {map_file.name}")
    from .checking import check_targets, list_checks

    if show_list:
        list_checks()
        return
    status = check_targets(
        models or [],
        only,
        skip or [],
        json_file,
        map_file,
        vocab_size=vocab_size,
        block_size=block_size,
        outputs=outputs,
        layout=layout,
        seed=seed,
        device=choose_device(device_name),
        threads=threads,
        budget=seconds,
        debug=debug,
    )
    if status:
        raise typer.Exit(status)


def _seconds(text: str | None) -> float | None:
    """Return a time as it is typed (90s, 4m, 90) in seconds."""
    if text is None:
        return None
    unit = UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"--budget takes 90s, 4m or seconds, got {text!r}")
    return seconds
