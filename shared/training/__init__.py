"""Training: a model learns a text, in steps that can be resumed exactly.

    recipe.py      steps, rates, the optimizer, and the seed of each draw
    trainer.py     one step after another, evaluated now and then
    processes.py   rank, world size and reductions over processes
    run_folder.py  the folder of a run, and its checkpoints written
    resume.py      a run's newest checkpoint, read back to go on or to use
    log.py         log.jsonl, one line a step
    loss_curve.py  the losses as a picture
    make_small_model.py  trains the small model that comes with the kit

The command gpt-duet train is cli/train.py.
"""

from .log import append_log, cut_log, read_log
from .loss_curve import draw_losses
from .processes import Processes, join_processes, own_device
from .recipe import Recipe
from .resume import (
    SavedRun,
    build_saved,
    describe_tokenizer,
    load_trained,
    open_run,
    recall_tokenizer,
)
from .run_folder import last_checkpoint, save
from .trainer import Record, Trainer, TrainingFailed, draw_sample

__all__ = [
    "Processes",
    "Recipe",
    "Record",
    "SavedRun",
    "Trainer",
    "TrainingFailed",
    "append_log",
    "build_saved",
    "cut_log",
    "describe_tokenizer",
    "draw_losses",
    "draw_sample",
    "join_processes",
    "last_checkpoint",
    "load_trained",
    "open_run",
    "own_device",
    "read_log",
    "recall_tokenizer",
    "save",
]
