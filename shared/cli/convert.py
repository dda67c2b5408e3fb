"""gpt-duet convert: write a checkpoint in another layout."""

import json
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from typer import Option

from ..console import show_facts
from ..files import require_new_folder
from . import options


def convert(
    layout: Annotated[Literal["gpt2", "nanogpt", "flat"], Option("--to")],
    out: Annotated[Path, Option(help="A new folder.")],
    weights: Annotated[
        Path | None,
        Option(
            help="A folder with model.safetensors and config.json, from "
            "transformers' GPT-2, nanoGPT, minGPT or the post GPT from "
            "Scratch."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        Option(
            "--checkpoint", help="Instead of --weights: a gpt-duet train run."
        ),
    ] = None,
    n_head: options.NHead = None,
    activation: options.Activation = None,
) -> None:
    """Write a checkpoint in another layout.

    The new folder has model.safetensors and config.json, and appears when
    both are complete. transformers loads "gpt2" as a GPT2LMHeadModel; nanoGPT
    and minGPT load "nanogpt" as their state dict. "flat" is for a program in
    any language: model.bin has a line of sizes and then float32 numbers,
    model.json has their names, shapes and offsets. Give --n-head and
    --activation if the config.json of the weights lacks them. The tokenizer
    of a run is copied as well, for gpt-duet generate --weights.
    """
    if (weights is None) == (run is None):
        raise ValueError("give either --weights or --checkpoint")
    require_new_folder(out)
    from ..checkpoint import (
        Checkpoint,
        in_gpt2_layout,
        load_checkpoint,
        save_checkpoint,
    )
    from ..training.run_folder import load_trained
    from .choices import TOKENIZER

    others: dict[str, str] = {}
    if weights is not None:
        source = weights
        checkpoint = load_checkpoint(
            weights, n_head=n_head, activation=activation
        )
    else:
        assert run is not None
        model, _, saved = load_trained(run)
        source, facts = run, saved.facts
        note = f"{facts.style}, after {saved.step} of {saved.recipe.steps} "
        checkpoint = Checkpoint(*in_gpt2_layout(model), (f"{note}steps",))
        tokenizer = {"name": facts.tokenizer, "characters": facts.characters}
        others[TOKENIZER] = json.dumps(tokenizer)
    save_checkpoint(out, checkpoint.state, checkpoint.config, layout, others)
    config = checkpoint.config
    reader = "transformers: GPT2LMHeadModel"
    # say whether nanoGPT or minGPT fits: nanoGPT has a tied head and gelu
    if layout == "nanogpt":
        head = "a tied" if config.tie_weights else "an untied"
        reader = f"nanoGPT or minGPT with {head} head and {config.activation}"
    if layout == "flat":
        reader = "a program in any language, as model.json describes it"
    shown = {
        "read": "; ".join((str(source), *checkpoint.notes)),
        "written": f"{out}; for {reader}",
    }
    show_facts(Console(highlight=False), shown)
