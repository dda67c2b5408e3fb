"""gpt-duet convert: a checkpoint from one layout to another."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..checkpoint import TARGETS, load_checkpoint, save_checkpoint
from ..config import GPTConfig
from ..console import show_facts
from ..files import require_new_folder
from . import options


def convert(
    weights: Annotated[
        Path,
        typer.Option(
            "--weights",
            help="A folder with model.safetensors and config.json: of "
            "transformers' GPT-2, nanoGPT, minGPT or the post GPT from "
            "Scratch.",
        ),
    ],
    layout: Annotated[
        str, typer.Option("--to", help=f"One of {', '.join(TARGETS)}.")
    ],
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    n_head: options.NHead = None,
    activation: options.Activation = None,
) -> None:
    """Write a checkpoint in another layout.

    The new folder has model.safetensors and config.json, and appears once
    both are whole. "gpt2" is what transformers loads as a GPT2LMHeadModel,
    "nanogpt" what nanoGPT and minGPT load as their state dict. --n-head and
    --activation are for weights whose config.json does not give them.
    """
    if layout not in TARGETS:
        raise ValueError(
            f"--to must be {' or '.join(TARGETS)}, got {layout!r}"
        )
    require_new_folder(out)
    checkpoint = load_checkpoint(weights, n_head=n_head, activation=activation)
    save_checkpoint(out, checkpoint.state, checkpoint.config, layout)
    reader = "transformers: GPT2LMHeadModel"
    if layout == "nanogpt":
        reader = _reader(checkpoint.config)
    facts = {
        "read": "; ".join((str(weights), *checkpoint.notes)),
        "written": f"{out}; for {reader}",
    }
    show_facts(Console(highlight=False), facts)


def _reader(config: GPTConfig) -> str:
    """Return which program computes this function from a state dict."""
    if config.tie_weights and config.activation == "gelu":
        return "nanoGPT"
    if not config.tie_weights and config.activation == "gelu_tanh":
        return "minGPT"
    head = "a tied" if config.tie_weights else "an untied"
    return (
        f"mingpt_style, but neither nanoGPT (a tied head, gelu) nor minGPT "
        f"(an untied head, gelu_tanh): this model has {head} head and "
        f"{config.activation}"
    )
