"""The folder of a training run: its checkpoints and its log.

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
import operator
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoint.config_json import our_config, read_config
from ..checkpoint.gpt2_layout import require_shapes
from ..config import GPTConfig
from ..files import new_folder, write_atomically
from .recipe import Recipe
from .trainer import Record, Trainer

KEPT = 2
FORMAT = "gpt-duet training run 1"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
LOG = "log.jsonl"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, checked and read but for its tensors.

    Attributes:
        folder: of the checkpoint.
        step: number of updates so far.
        seconds: spent so far.
        config: of the model.
        recipe: of the run.
        facts: what else the run must know: style, text, tokenizer, dtype.
    """

    folder: Path
    step: int
    seconds: float
    config: GPTConfig
    recipe: Recipe
    facts: dict[str, Any]

    def load_model(self, model: nn.Module) -> None:
        """Give a model the saved weights, in place.

        Raises:
            ValueError: where names or shapes are not the model's.
        """
        _copy_into(_tensors_of(model), _read(self.folder / MODEL))

    def load_trainer(self, trainer: Trainer) -> None:
        """Put a trainer where the run was: weights, moments, step.

        Raises:
            ValueError: where names or shapes are not the model's.
        """
        self.load_model(trainer.model)
        saved = _read(self.folder / OPTIMIZER)
        state = trainer.optimizer.state
        if self.step == 0:
            return  # AdamW has no moments before its first step
        parameters = dict(trainer.model.named_parameters())
        shapes: dict[str, tuple[int, ...]] = {}
        for name, p in parameters.items():
            shapes |= {f"{name}.{m}": tuple(p.shape) for m in _MOMENTS[:2]}
            shapes[f"{name}.step"] = ()
        require_shapes(saved, shapes)
        for name, p in parameters.items():
            state[p] = {m: saved[f"{name}.{m}"].to(p.device) for m in _MOMENTS}
        trainer.step, trainer.seconds = self.step, self.seconds


def save(
    folder: Path, trainer: Trainer, config: GPTConfig, facts: Mapping[str, Any]
) -> Path:
    """Write a checkpoint whole or not at all, and keep the last two.

    Args:
        folder: of the run.
        trainer: between two steps.
        config: of its model.
        facts: what a resumed run must know.

    Returns:
        The checkpoint's folder.
    """
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    for old in checkpoints.glob(".*"):
        shutil.rmtree(old)  # what a killed process left half written
    path = checkpoints / f"step-{trainer.step:08}"
    if path.exists():
        return path
    with new_folder(path) as beside:
        _write(beside / MODEL, _tensors_of(trainer.model))
        names: dict[Tensor, str] = {
            p: n for n, p in trainer.model.named_parameters()
        }
        moments = {
            f"{names[p]}.{moment}": state[moment]
            for p, state in trainer.optimizer.state.items()
            for moment in _MOMENTS
        }
        _write(beside / OPTIMIZER, moments)
        (beside / "config.json").write_text(our_config(config))
        run = {
            "format": FORMAT,
            "step": trainer.step,
            "seconds": trainer.seconds,
            "recipe": asdict(trainer.recipe),
            "sha256": {n: _digest(beside / n) for n in (MODEL, OPTIMIZER)},
            **facts,
        }
        (beside / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    for old in _found(checkpoints)[:-KEPT]:
        # renamed first: a folder with a checkpoint's name is a whole one
        os.replace(old, hidden := old.with_name(f".{old.name}"))
        shutil.rmtree(hidden)
    return path


def last_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a run; one named itself is that one.

    Raises:
        ValueError: where there is none.
    """
    if (folder / "run.json").is_file():
        return folder
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    found = _found(folder / "checkpoints")
    if not found:
        raise ValueError(f"{folder} has no checkpoints of a training run")
    return found[-1]


def open_run(folder: Path) -> SavedRun:
    """Read and check the newest checkpoint of a run.

    Raises:
        ValueError: for a folder without one, and for one that is damaged or
            written by something else.
    """
    path = last_checkpoint(folder)
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
        damaged = [n for n in digests if _digest(path / n) != digests[n]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged, or no checkpoint of this command: {error}"
            f"{_earlier(path)}"
        ) from None
    if damaged:
        raise ValueError(
            f"{path} is damaged: {damaged[0]} is not what was written"
            f"{_earlier(path)}"
        )
    return SavedRun(path, step, seconds, config, recipe, run)


def append_log(folder: Path, record: Record) -> None:
    """Add a step to the log."""
    line = {k: v for k, v in asdict(record).items() if v is not None}
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the log's lines, without one that a killed process cut off.

    Raises:
        ValueError: for a line that is no step's.
    """
    path = folder / LOG
    if not path.is_file():
        return []
    *whole, _cut_off = path.read_bytes().split(b"\n")
    log = []
    for number, line in enumerate(whole, start=1):
        try:
            log.append(json.loads(line))
            operator.index(log[-1]["step"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path} is damaged: line {number} is no step; move the log "
                "away to go on without it"
            ) from None
    return log


def cut_log(folder: Path, step: int) -> None:
    """Drop what the log says about steps after a checkpoint."""
    kept = [line for line in read_log(folder) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    write_atomically(folder / LOG, text)


def _found(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("step-*"))


def _earlier(path: Path) -> str:
    earlier = [p for p in _found(path.parent) if p < path]
    if not earlier:
        return ""
    return f"; remove it to go on from {earlier[-1].name}"


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; of tied ones the first name only."""
    state = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in names.values()}


def _copy_into(
    tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> None:
    require_shapes(saved, {k: tuple(t.shape) for k, t in tensors.items()})
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())  # on the disk before it gets its name


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
