"""gpt-duet convert: a checkpoint from one layout to another."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text as RichText

from ..checkpoint import TARGETS, load_checkpoint, save_checkpoint
from ..config import GPTConfig
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
    out: Annotated[
        Path, typer.Option("--out", help="A folder that is not there yet.")
    ],
    n_head: options.NHead = None,
    activation: options.Activation = None,
) -> None:
    """Write a checkpoint in another layout.

    Its new folder has model.safetensors and config.json, and appears once
    both are whole. "gpt2" is what transformers loads as a GPT2LMHeadModel,
    "nanogpt" what nanoGPT and minGPT load as their state dict.
    """
    if layout not in TARGETS:
        raise ValueError(
            f"--to must be {' or '.join(TARGETS)}, got {layout!r}"
        )
    require_new_folder(out)
    checkpoint = load_checkpoint(weights, n_head=n_head, activation=activation)
    save_checkpoint(out, checkpoint.state, checkpoint.config, layout)
    console = Console()
    whose = "transformers: GPT2LMHeadModel"
    if layout == "nanogpt":
        whose = _whose_state_dict(checkpoint.config)
    facts = {
        "read": "; ".join((str(weights), *checkpoint.notes)),
        "written": f"{out}; for {whose}",
    }
    for name, fact in facts.items():
        line = RichText.assemble((f"{name:9}", "bold cyan"), fact)
        console.print(line, soft_wrap=True)


def _whose_state_dict(config: GPTConfig) -> str:
    """Which of the two programs computes this function from the file."""
    if config.tie_weights and config.activation == "gelu":
        return "nanoGPT"
    if not config.tie_weights and config.activation == "gelu_tanh":
        return "minGPT"
    return (
        f"mingpt_style; neither nanoGPT (tied, gelu) nor minGPT (not tied, "
        f"gelu_tanh) computes it: it is "
        f"{'tied' if config.tie_weights else 'not tied'}, {config.activation}"
    )
