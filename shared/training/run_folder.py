"""The folder of a training run, and how its checkpoints are written.

    log.jsonl                         one object a line, for each step
    checkpoints/step-00000250/        the last two
      model.safetensors config.json   the weights as the style names them
      optimizer.safetensors           AdamW's moments
      run.json                        how far, by which recipe, on what text
    loss.png sample.txt               at the end

The rate, the batches and the dropout of a step follow from its number and
the recipe, so they need no state. Nothing is a pickle.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoint.config_json import our_config
from ..config import GPTConfig
from ..files import new_folder
from .trainer import Trainer

KEPT = 2
FORMAT = "gpt-duet training run 1"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save(
    folder: Path, trainer: Trainer, config: GPTConfig, facts: Mapping[str, Any]
) -> Path:
    """Write a checkpoint whole or not at all, and keep the last two.

    The facts are what a resumed run must know. Returns its folder.
    """
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    for old in checkpoints.glob(".step-*"):
        shutil.rmtree(old)  # what a killed process left half written
    path = checkpoints / f"step-{trainer.step:08}"
    if path.exists():
        return path
    with new_folder(path) as beside:
        _write(beside / MODEL, tensors_of(trainer.model))
        names: dict[Tensor, str] = {
            p: n for n, p in trainer.model.named_parameters()
        }
        moments = {
            f"{names[p]}.{moment}": state[moment]
            for p, state in trainer.optimizer.state.items()
            for moment in MOMENTS
        }
        _write(beside / OPTIMIZER, moments)
        (beside / "config.json").write_text(our_config(config))
        run = {
            "format": FORMAT,
            "step": trainer.step,
            "seconds": trainer.seconds,
            "recipe": asdict(trainer.recipe),
            "sha256": {n: digest(beside / n) for n in (MODEL, OPTIMIZER)},
            **facts,
        }
        (beside / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    for old in checkpoints_in(checkpoints)[:-KEPT]:
        # renamed first: a folder with a checkpoint's name is a whole one
        os.replace(old, hidden := old.with_name(f".{old.name}"))
        shutil.rmtree(hidden)
    return path


def last_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a run; one named itself is that one."""
    if (folder / "run.json").is_file():
        return folder
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    found = checkpoints_in(folder / "checkpoints")
    if not found:
        raise ValueError(f"{folder} has no checkpoints of a training run")
    return found[-1]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers; of tied ones the first name only."""
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: state[name].detach() for name in first.values()}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())  # on the disk before it gets its name
