"""The resume of a run: its newest checkpoint, checked and read back."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import convert
from ..checkpoint.config_json import read_config
from ..checkpoint.gpt2_layout import require_shapes
from ..checkpoint.weights_file import read_tensors
from ..config import GPTConfig
from ..protocol import load_style
from ..tokenization.tokenizers import CharTokenizer, Tokenizer, load_tokenizer
from ..validation import DTYPES, choose_dtype
from .recipe import Recipe
from .run_folder import (
    FORMAT,
    MODEL,
    MOMENTS,
    OPTIMIZER,
    checkpoints_in,
    digest,
    last_checkpoint,
    tensors_of,
)
from .trainer import Trainer


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, checked and read but for its tensors.

    The facts are what else the run must know: style, text, tokenizer, dtype.
    """

    folder: Path
    step: int
    seconds: float
    config: GPTConfig
    recipe: Recipe
    facts: dict[str, Any]

    def load_model(self, model: nn.Module) -> None:
        """Give a model the saved weights, in place; ValueError for others."""
        saved, tensors = read_tensors(self.folder / MODEL), tensors_of(model)
        require_shapes(saved, {name: t.shape for name, t in tensors.items()})
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])

    def load_trainer(self, trainer: Trainer) -> None:
        """Put a trainer where the run was: weights, moments, step."""
        self.load_model(trainer.model)
        if self.step == 0:
            return  # AdamW has no moments before its first step
        saved = read_tensors(self.folder / OPTIMIZER)
        parameters = {
            name: p
            for name, p in trainer.model.named_parameters()
            if f"{name}.step" in saved  # a frozen one has no moments
        }
        shapes = {
            f"{name}.{m}": () if m == "step" else tuple(p.shape)
            for name, p in parameters.items()
            for m in MOMENTS
        }
        require_shapes(saved, shapes)
        for name, p in parameters.items():
            trainer.optimizer.state[p] = {
                m: saved[f"{name}.{m}"].to(p.device) for m in MOMENTS
            }
        trainer.step, trainer.seconds = self.step, self.seconds


def open_run(folder: Path) -> SavedRun:
    """Read and check the newest checkpoint of a run.

    Raises:
        ValueError: for a folder without one, and for one that is damaged or
            written by something else.
    """
    path = last_checkpoint(folder)
    earlier = [p for p in checkpoints_in(path.parent) if p < path]
    advice = f"; remove it to go on from {earlier[-1].name}" if earlier else ""
    try:
        run = json.loads((path / "run.json").read_bytes())
        if run.pop("format") != FORMAT:
            raise ValueError("another format")
        fields = run.pop("recipe")
        recipe = Recipe(**fields | {"betas": tuple(fields["betas"])})
        digests = run.pop("sha256")
        step, seconds = int(run.pop("step")), float(run.pop("seconds"))
        fields, _ = read_config(path / "config.json")
        config = GPTConfig(**fields)
        damaged = [n for n in digests if digest(path / n) != digests[n]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged, or no checkpoint of this command: {error}"
            f"{advice}"
        ) from None
    if damaged:
        raise ValueError(
            f"{path} is damaged: {damaged[0]} is not what was written{advice}"
        )
    return SavedRun(path, step, seconds, config, recipe, run)


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
    return model.to(choose_dtype(run.facts["dtype"], DTYPES))


def describe_tokenizer(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what makes the same tokenizer again, for JSON."""
    if isinstance(tokenizer, CharTokenizer):
        return {"name": name, "characters": tokenizer.characters}
    return {"name": name}


def recall_tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that `describe_tokenizer` described."""
    return load_tokenizer(facts["name"], facts.get("characters"))
