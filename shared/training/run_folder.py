"""Write and read the folder of a training run.

    log.jsonl                         a line for each step
    checkpoints/step-00000250/        the last two checkpoints
      model.safetensors               the weights as the style names them
      optimizer.safetensors           AdamW's moments
      run.json                        step, recipe, and facts on the text
    loss.png sample.txt               at the end
    lock                              the id of the process that trains now

The rate, the batches and the dropout of a step depend only on the step's
number and the recipe, so they have no state to save. No file is a pickle.
"""

import hashlib
import math
import os
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from ..checkpoint import convert
from ..checkpoint.weights_file import require_numbers
from ..config import GPTConfig
from ..files import new_folder, write_atomically
from ..protocol import load_style
from ..tokenization.tokenizers import Tokenizer, load_tokenizer
from ..validation import DTYPES, choose_dtype
from .recipe import Recipe
from .trainer import Record, Trainer

KEPT = 2
MODEL, OPTIMIZER, RUN = (
    "model.safetensors",
    "optimizer.safetensors",
    "run.json",
)
LOG = "log.jsonl"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The text, tokenizer and style of a run."""

    style: str  # name of the package
    dtype: str  # dtype of the weights
    tokenizer: str  # name of the tokenizer
    characters: str | None = None  # characters of the tokenizer "char"
    # path of the text; None for Python's documentation
    text_file: str | None = None
    text_sha256: str = ""  # the result of `text_stamp`


class SavedRun(msgspec.Struct, frozen=True):
    """The content of a checkpoint's run.json.

    `sha256` has the hashes of the other files of the checkpoint.
    """

    format: Literal["gpt-duet training run 2"]
    step: int
    seconds: float
    config: GPTConfig
    recipe: Recipe
    facts: Facts
    sha256: dict[str, str]

    def build(self) -> nn.Module:
        """Build a fresh model of the run's style, sizes and dtype."""
        torch.manual_seed(self.recipe.seed)
        model = load_style(self.facts.style).build_model(self.config)
        return model.to(choose_dtype(self.facts.dtype, DTYPES))


def save(folder: Path, trainer: Trainer, facts: Facts) -> Path:
    """Write a checkpoint, all or nothing; keep only the last two.

    Returns:
        The folder of the checkpoint.
    """
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    for old in checkpoints.glob(".step-*"):
        # a checkpoint that a killed process left incomplete
        shutil.rmtree(old)
    path = checkpoints / f"step-{trainer.step:08}"
    if path.exists():
        return path
    with new_folder(path) as beside:
        save_model(trainer.model, str(beside / MODEL))
        optimizer = trainer.optimizer.state_dict()
        moments = {
            f"{number}.{name}": moment.contiguous()
            for number, state in optimizer["state"].items()
            for name, moment in state.items()
        }
        save_file(moments, beside / OPTIMIZER)
        run = SavedRun(
            "gpt-duet training run 2",
            trainer.step,
            trainer.seconds,
            trainer.config,
            trainer.recipe,
            facts,
            {name: _sha256(beside / name) for name in (MODEL, OPTIMIZER)},
        )
        (beside / RUN).write_bytes(msgspec.json.encode(run))
    for old in _checkpoints_in(checkpoints)[:-KEPT]:
        # first hide it: a folder named step-... must be a whole checkpoint
        os.replace(old, hidden := old.with_name(f".{old.name}"))
        shutil.rmtree(hidden)
    return path


def change_steps(checkpoint: Path, run: SavedRun, steps: int) -> SavedRun:
    """Write a new number of steps into a checkpoint; return its run.

    Raises:
        ValueError: if the run has already taken that many steps.
    """
    recipe = replace(run.recipe, steps=steps)
    if steps <= run.step:
        raise ValueError(
            f"--steps {steps}: the run has already taken {run.step} steps"
        )
    run = msgspec.structs.replace(run, recipe=recipe)
    text = msgspec.json.encode(run).decode()
    write_atomically(checkpoint / RUN, text)
    return run


def last_checkpoint(folder: Path) -> Path:
    """Return a run's newest checkpoint, or a folder that is a checkpoint."""
    if (folder / RUN).is_file():
        return folder
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    found = _checkpoints_in(folder / "checkpoints")
    if not found:
        raise ValueError(f"{folder} has no checkpoints of a training run")
    return found[-1]


def open_run(folder: Path) -> tuple[Path, SavedRun]:
    """Find a run's newest checkpoint, and check it before it is loaded.

    Returns:
        The folder of the checkpoint, and its run.json.

    Raises:
        ValueError: if there is no checkpoint, or if it is damaged or was
            written by another program.
    """
    path = last_checkpoint(folder)
    earlier = [p for p in _checkpoints_in(path.parent) if p < path]
    advice = ""
    if earlier:
        advice = f"; remove it to continue from {earlier[-1].name}"
    try:
        run = msgspec.json.decode((path / RUN).read_bytes(), type=SavedRun)
        for name, expected in run.sha256.items():
            if _sha256(path / name) != expected:
                raise ValueError(f"{name} has changed since it was written")
        _require_sizes(path / MODEL, run.config)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"{path} is damaged, or not a checkpoint of this command: {error}"
            f"{advice}"
        ) from None
    return path, run


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights into a model, or raise ValueError."""
    try:
        load_model(model, checkpoint / MODEL)
    except RuntimeError as error:
        raise ValueError(f"weights do not fit: {error}") from None
    require_numbers(checkpoint / MODEL, model.state_dict())


def resume(checkpoint: Path, run: SavedRun, trainer: Trainer) -> None:
    """Give a new trainer the weights, moments and step of a run."""
    load_weights(checkpoint, trainer.model)
    moments: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, moment in load_file(checkpoint / OPTIMIZER).items():
        number, _, kind = name.partition(".")
        moments[int(number)][kind] = moment
    fresh = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict(fresh | {"state": moments})
    trainer.step, trainer.seconds = run.step, run.seconds


def load_trained(
    folder: str | Path, style: str | None = None
) -> tuple[nn.Module, Tokenizer, SavedRun]:
    """Load the model of a training run from its newest checkpoint.

    Args:
        folder: folder of the run, or of one of its checkpoints.
        style: style to rebuild the model in; None is that of the run.

    Returns:
        The model in eval mode, its tokenizer, and the run.

    Raises:
        ValueError: for a folder without a checkpoint, or a damaged one.
    """
    checkpoint, run = open_run(Path(folder))
    model = run.build().eval()
    load_weights(checkpoint, model)
    if style not in (None, run.facts.style):
        model = convert(model, str(style))
    facts = run.facts
    return model, load_tokenizer(facts.tokenizer, facts.characters), run


def append_log(folder: Path, record: Record) -> None:
    """Add a line for a step to the log."""
    with (folder / LOG).open("ab") as log:
        log.write(msgspec.json.encode(record) + b"\n")


def read_log(folder: Path) -> list[Record]:
    """Return the steps in the log; leave out a line that was cut off.

    Raises:
        ValueError: if a line is not a step.
    """
    path = folder / LOG
    if not path.is_file():
        return []
    whole, _, _cut_off = path.read_bytes().rpartition(b"\n")
    try:
        return msgspec.json.Decoder(Record).decode_lines(whole)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; move the log away to continue "
            "without it"
        ) from None


def cut_log(folder: Path, step: int) -> None:
    """Remove from the log the steps that come after this step."""
    kept = [record for record in read_log(folder) if record.step <= step]
    text = msgspec.json.Encoder().encode_lines(kept).decode()
    write_atomically(folder / LOG, text)


def _checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _require_sizes(file: Path, config: GPTConfig) -> None:
    """Raise ValueError for a config with more weights than a file holds.

    Check this before the model is built, because it may be too large to build.
    The position table does not count: in some styles it is not a weight.
    """
    width, layers = config.n_embd, config.n_layer
    block = 4 * width**2 + 2 * width * config.inner_size
    needed = config.vocab_size * width + layers * block
    with safe_open(file, "pt") as tensors:
        names = tensors.keys()
        shapes = [tensors.get_slice(name).get_shape() for name in names]
    held = sum(map(math.prod, shapes))
    if needed > held:
        raise ValueError(
            f"{RUN} says n_layer {layers}, n_embd {width} and vocab_size "
            f"{config.vocab_size}, at least {needed:,} numbers: {file.name} "
            f"holds {held:,}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
