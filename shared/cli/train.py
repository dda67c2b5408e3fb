"""gpt-duet train: a model learns a text, and can be stopped at any time."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..files import require_new_folder
from ..validation import choose_device
from . import options


def train(
    context: typer.Context,
    style: options.Style = "mingpt_style",
    out: Annotated[
        Path | None, Option(help="A new folder for the run.")
    ] = None,
    resume: Annotated[
        Path | None, Option(help="Go on with the run in this folder.")
    ] = None,
    start: Annotated[
        str | None,
        Option(
            "--from",
            help='Start from trained weights: "default", the small model of '
            "the kit with its tokenizer, or a folder as of --weights.",
        ),
    ] = None,
    file: options.File = None,
    tokenizer_name: options.TokenizerName = "char",
    preset: options.Preset = None,
    n_layer: options.NLayer = None,
    n_head: options.NHead = None,
    n_embd: options.NEmbd = None,
    block_size: options.BlockSize = None,
    activation: options.Activation = None,
    dropout: Annotated[float, Option(help="Probability of dropout.")] = 0.0,
    tie_weights: Annotated[
        bool | None,
        Option(
            "--tie-weights/--no-tie-weights",
            help="Whether head and token embedding are one matrix, in a "
            "style that can tie. Default: as --preset, else not.",
            show_default=False,
        ),
    ] = None,
    steps: options.Steps = 2000,
    batch_size: options.BatchSize = 12,
    lr: options.LearningRate = 1e-3,
    eval_interval: Annotated[
        int,
        Option(help="Steps from one evaluation and checkpoint to the next."),
    ] = 250,
    eval_batches: options.EvalBatches = 100,
    dtype_name: options.Dtype = "float32",
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Train a model on a text, in either style.

    The folder gets a log, the last two checkpoints, and at the end a loss
    curve and a sample. Ctrl-C and SIGTERM save first (status 130 and 143);
    --resume then goes on as if the run had not been stopped. With several
    processes: torchrun --nproc-per-node 2 -m gpt_duet.cli train ...
    """
    if (out is None) == (resume is None):
        raise ValueError(
            "give --out for a new run, or --resume for one to go on with"
        )
    from ..invariants.model.threads import few_threads
    from ..training.processes import join_processes, own_device
    from ..training.recipe import Recipe
    from .choices import ModelOptions
    from .training import resume_run, start_run, train_to_the_end

    device = own_device(choose_device(device_name))
    with join_processes(device) as processes:
        given = options.given(context)
        if resume is not None:
            run = resume_run(resume, file, given, device, processes)
        else:
            assert out is not None
            if processes.first:
                require_new_folder(out)
            recipe = Recipe(
                steps=steps,
                batch_size=batch_size,
                lr=lr,
                eval_interval=eval_interval,
                eval_batches=eval_batches,
                seed=seed,
            )
            if start == "default" and "--tokenizer" not in given:
                tokenizer_name = options.TOKENIZER
            run = start_run(
                out, recipe, file, tokenizer_name, device, processes,
                style=style,
                start=start,
                sizes=ModelOptions(
                    preset, n_layer, n_head, n_embd, block_size, activation
                ),
                dropout=dropout,
                tie_weights=tie_weights,
                dtype_name=dtype_name,
            )  # fmt: skip
        trainer = run.trainer
        size = sum(p.numel() for p in trainer.model.parameters())
        window = trainer.recipe.batch_size * trainer.config.block_size
        with few_threads(size, window, threads):
            train_to_the_end(run)
