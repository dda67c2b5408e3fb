"""gpt-duet diff: the source of both styles, side by side."""

import os
from typing import Annotated

import typer
from rich.console import Console

from ..comparison.concepts import choose_concepts
from ..comparison.sources import concept_names, pair_sources
from ..comparison.terminal import show_sources
from ..protocol import load_style
from ..validation import whole_number

NARROWEST = 40


def diff(
    concept: Annotated[
        str | None,
        typer.Argument(
            help="embedding, attention, feed_forward, block, model or head. "
            "Default: all of them.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            "--width",
            help="Columns to use; below 120 the styles stand one under the "
            "other. Default: the terminal's.",
        ),
    ] = None,
    left: Annotated[
        str, typer.Option("--left", help="Package of the style on the left.")
    ] = "annotated",
    right: Annotated[
        str, typer.Option("--right", help="Package of the style on the right.")
    ] = "mingpt_style",
) -> None:
    """Show the source of a concept in both styles, side by side.

    In a terminal a long answer goes through a pager ($PAGER, or less).
    """
    if width is not None:
        whole_number("--width", width, at_least=NARROWEST)
    styles = load_style(left), load_style(right)
    chosen = choose_concepts(concept, concept_names(*styles))
    sources = pair_sources(*styles)
    # without this, less does not show colours
    os.environ.setdefault("LESS", "-FRX")
    console = Console(highlight=False, width=width)
    show_sources(console, (left, right), {c: sources[c] for c in chosen})
