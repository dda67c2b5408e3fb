"""A trained model with its tokenizer, from the folder of its run."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import convert
from ..protocol import load_style
from ..tokenization.tokenizers import CharTokenizer, Tokenizer, load_tokenizer
from ..validation import DTYPES
from .run_folder import SavedRun, open_run


def load_trained(
    folder: str | Path, style: str | None = None
) -> tuple[nn.Module, Tokenizer, SavedRun]:
    """Load what a training run has learnt, from its newest checkpoint.

    Args:
        folder: of the run, or of one of its checkpoints.
        style: to rebuild the model in; None: the style it was trained in.

    Returns:
        The model in eval mode, its tokenizer, and the run.

    Raises:
        ValueError: for a folder without a checkpoint, or a damaged one.
    """
    run = open_run(Path(folder))
    model = build_saved(run)
    run.load_model(model)
    model.eval()
    if style not in (None, run.facts["style"]):
        model = convert(model, str(style))
    return model, recall_tokenizer(run.facts["tokenizer"]), run


def build_saved(run: SavedRun) -> nn.Module:
    """Build a model of a run's style, sizes and dtype, freshly drawn."""
    torch.manual_seed(run.recipe.seed)
    model = load_style(run.facts["style"]).build_model(run.config)
    return model.to(DTYPES[run.facts["dtype"]])


def describe_tokenizer(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what makes the same tokenizer again, for JSON."""
    if isinstance(tokenizer, CharTokenizer):
        return {"name": name, "characters": tokenizer.characters}
    return {"name": name}


def recall_tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that `describe_tokenizer` described."""
    return load_tokenizer(facts["name"], facts.get("characters"))
