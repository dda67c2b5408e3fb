"""gpt-duet train: a model learns a text, and can be stopped at any time."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..files import require_new_folder
from ..validation import choose_device, choose_dtype
from . import options

SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}


def train(
    context: typer.Context,
    style: options.Style = "mingpt_style",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A new folder for the run."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Go on with the run in this folder."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
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
    dropout: Annotated[
        float, typer.Option("--dropout", help="Probability of dropout.")
    ] = 0.0,
    tie_weights: Annotated[
        bool | None,
        typer.Option(
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
        typer.Option(
            "--eval-interval",
            help="Steps from one evaluation and checkpoint to the next.",
        ),
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
    processes: torchrun --nproc-per-node 2 -m shared.cli train ...
    """
    if (out is None) == (resume is None):
        raise ValueError(
            "give --out for a new run, or --resume for one to go on with"
        )
    import torch

    from ..invariants.model.threads import few_threads
    from ..protocol import LanguageModel, load_style
    from ..tokenization.texts import text_stamp
    from ..tokenization.tokenizers import load_tokenizer
    from ..training import (
        Recipe,
        Trainer,
        describe_tokenizer,
        join_processes,
        own_device,
    )
    from .choices import (
        ModelOptions,
        choose_config,
        choose_start,
        choose_text,
    )
    from .training_loop import Run, train_to_the_end
    from .training_start import continue_from, resume_run, split

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
            load_style(style)
            dtype = choose_dtype(dtype_name)
            text, _ = choose_text(None, file)
            if start == "default" and "--tokenizer" not in given:
                tokenizer_name = options.TOKENIZER
            tokenizer = load_tokenizer(tokenizer_name, text)
            model_options = ModelOptions(
                preset, n_layer, n_head, n_embd, block_size, activation
            )
            torch.manual_seed(recipe.seed)
            if start is None:
                config = choose_config(
                    model_options, tokenizer, SIZES,
                    dropout=dropout, tie_weights=tie_weights,
                )  # fmt: skip
                # a preset may have room for more tokens than can be written
                config = config.replace(vocab_size=tokenizer.n_vocab)
                model = load_style(style).build_model(config)
            else:
                if "--tie-weights" in given:
                    raise ValueError("--from brings its own head")
                checkpoint = choose_start(
                    start, model_options, tokenizer, tokenizer_name
                )
                config = checkpoint.config.replace(dropout=dropout)
                model = continue_from(style, checkpoint.state, config)
            if not isinstance(model, LanguageModel):
                raise ValueError(f"style {style!r} builds no language model")
            facts = {
                "style": style,
                "dtype": dtype_name,
                "text": {
                    "file": None if file is None else str(file.absolute()),
                    "sha256": text_stamp(text),
                },
                "tokenizer": describe_tokenizer(tokenizer_name, tokenizer),
            }
            model.to(device, dtype)
            parts = split(tokenizer, text, device)
            trainer = Trainer(model, *parts, recipe, processes)
            run = Run(out, trainer, config, facts, tokenizer, new=True)
        size = sum(p.numel() for p in run.trainer.model.parameters())
        window = run.trainer.recipe.batch_size * run.config.block_size
        with few_threads(size, window, threads):
            train_to_the_end(run, Console(stderr=True, highlight=False))
