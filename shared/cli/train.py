"""gpt-duet train: a model learns a text, and can be stopped at any time."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..files import require_new_folder
from ..protocol import LanguageModel, load_style
from ..tokenization.texts import split_ids, text_stamp
from ..tokenization.tokenizers import Tokenizer, load_tokenizer
from ..training import (
    Processes,
    Recipe,
    Trainer,
    build_saved,
    cut_log,
    describe_tokenizer,
    join_processes,
    open_run,
    own_device,
    recall_tokenizer,
)
from ..validation import choose_device, choose_dtype
from . import options
from .training_run import Run, work

STYLE = "mingpt_style"
# nanoGPT's sizes for a CPU
SIZES: dict[str, Any] = {
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64,
}  # fmt: skip
RECIPE = Recipe()


def train(
    style: Annotated[
        str | None,
        typer.Option("--style", help=f"Package of the style. [{STYLE}]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A folder that is not there yet."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Go on with the run in this folder."),
    ] = None,
    file: options.File = None,
    tokenizer_name: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", help='As of compare and generate. ["char"]'
        ),
    ] = None,
    preset: options.Preset = None,
    n_layer: options.NLayer = None,
    n_head: options.NHead = None,
    n_embd: options.NEmbd = None,
    block_size: options.BlockSize = None,
    activation: options.Activation = None,
    dropout: Annotated[
        float | None, typer.Option("--dropout", help="Probability. [0]")
    ] = None,
    tie_weights: Annotated[
        bool | None,
        typer.Option(
            "--tie-weights/--no-tie-weights",
            help="Whether head and token embedding are one matrix, in a "
            "style that can tie. Default: as --preset, else not.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help=f"Updates. [{RECIPE.steps}]"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help=f"Windows a step, over all processes. [{RECIPE.batch_size}]",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option("--lr", help=f"Highest learning rate. [{RECIPE.lr:g}]"),
    ] = None,
    eval_interval: Annotated[
        int | None,
        typer.Option(
            "--eval-interval",
            help="Steps between two evaluations and checkpoints. "
            f"[{RECIPE.eval_interval}]",
        ),
    ] = None,
    eval_batches: Annotated[
        int | None,
        typer.Option(
            "--eval-batches",
            help=f"Batches of an evaluation. [{RECIPE.eval_batches}]",
        ),
    ] = None,
    dtype_name: Annotated[
        str | None,
        typer.Option("--dtype", help='"float32" or "float64". [float32]'),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of weights, batches and dropout. [0]"),
    ] = None,
    device_name: options.Device = "cpu",
) -> None:
    """Train a model on a text, in either style.

    The folder gets a log, the last two checkpoints, and at the end a loss
    curve and a sample. Ctrl-C and SIGTERM save first; --resume then goes on
    as if nothing had happened. Several processes: torchrun
    --nproc-per-node 2 -m shared.cli train ...
    """
    recipe = {
        "steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed,
        "eval_interval": eval_interval, "eval_batches": eval_batches,
    }  # fmt: skip
    model = {
        "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd,
        "block_size": block_size, "activation": activation,
        "dropout": dropout, "tie_weights": tie_weights,
    }  # fmt: skip
    names = {"style": style, "dtype": dtype_name, "tokenizer": tokenizer_name}
    if (out is None) == (resume is None):
        raise ValueError(
            "give --out for a new run, or --resume for one to go on with"
        )
    device = own_device(choose_device(device_name))
    with join_processes(device) as processes:
        if out is not None:
            run = _start(
                out, file, preset, names, model, recipe, device, processes
            )
        else:
            assert resume is not None
            if preset is not None:
                raise ValueError("--resume brings its sizes: leave --preset")
            given = model | recipe | names
            run = _resume(resume, file, given, device, processes)
        work(run, Console(stderr=True, highlight=False))


def _start(
    out: Path,
    file: Path | None,
    preset: str | None,
    names: Mapping[str, str | None],
    model: dict[str, Any],
    recipe: dict[str, Any],
    device: torch.device,
    processes: Processes,
) -> Run:
    if processes.first:
        require_new_folder(out)
    style = STYLE if names["style"] is None else names["style"]
    school = load_style(style)
    dtype_name = names["dtype"] or "float32"
    dtype = choose_dtype(dtype_name)
    chosen = Recipe(**{k: v for k, v in recipe.items() if v is not None})
    text, _ = options.choose_text(None, file)
    name = names["tokenizer"] or "char"
    tokenizer = load_tokenizer(name, text)
    if model["dropout"] is None:
        model["dropout"] = 0.0
    if preset is None:
        model = SIZES | {k: v for k, v in model.items() if v is not None}
    config = options.choose_config(preset, tokenizer, **model)
    # a preset may have room for more tokens than can be written
    config = config.replace(vocab_size=tokenizer.n_vocab)
    facts = {
        "style": style,
        "dtype": dtype_name,
        "text": {
            "file": None if file is None else str(file.absolute()),
            "sha256": text_stamp(text),
        },
        "tokenizer": describe_tokenizer(name, tokenizer),
    }
    torch.manual_seed(chosen.seed)
    built = school.build_model(config)
    if not isinstance(built, LanguageModel):
        raise ValueError(f"style {style!r} builds no language model")
    built.to(device, dtype)
    train_ids, val_ids = _split(tokenizer, text, device)
    trainer = Trainer(built, train_ids, val_ids, chosen, processes)
    return Run(out, trainer, config, facts, tokenizer, new=True)


def _resume(
    folder: Path,
    file: Path | None,
    given: Mapping[str, Any],
    device: torch.device,
    processes: Processes,
) -> Run:
    saved = open_run(folder)
    facts = saved.facts
    was = {f.name: getattr(saved.recipe, f.name) for f in fields(Recipe)}
    was |= vars(saved.config) | {k: facts[k] for k in ("style", "dtype")}
    was |= {"tokenizer": facts["tokenizer"]["name"]}
    for name, value in given.items():
        if value is not None and value != was[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}, but the run in "
                f"{folder} has {was[name]}: a resumed run keeps to its start"
            )
    known = facts["text"]["file"]
    if file is None and known is not None:
        file = Path(known)
    text, source = options.choose_text(None, file)
    if text_stamp(text) != facts["text"]["sha256"]:
        raise ValueError(
            f"{source} is not the text of the run in {folder}: sha256 "
            f"{text_stamp(text)} for {facts['text']['sha256']}"
        )
    tokenizer = recall_tokenizer(facts["tokenizer"])
    model = build_saved(saved).to(device)
    train_ids, val_ids = _split(tokenizer, text, device)
    trainer = Trainer(model, train_ids, val_ids, saved.recipe, processes)
    saved.load_trainer(trainer)
    if processes.first:
        cut_log(folder, saved.step)
    return Run(folder, trainer, saved.config, facts, tokenizer, new=False)


def _split(
    tokenizer: Tokenizer, text: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    return split_ids(torch.tensor(tokenizer.encode(text), device=device))
