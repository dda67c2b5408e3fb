"""gpt-duet train: a model learns a text, and can be stopped at any time."""

import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from shared.config import GPTConfig
from shared.corpus import split_ids, text_stamp
from shared.files import new_folder, require_new_folder, write_atomically
from shared.generation import generate
from shared.loss_curve import draw_losses
from shared.optimization import Recipe
from shared.processes import Processes, join_processes, own_device
from shared.protocol import LanguageModel, load_style
from shared.run_folder import (
    append_log,
    cut_log,
    last_checkpoint,
    open_run,
    read_log,
    save,
)
from shared.tokenization import Tokenizer, load_tokenizer
from shared.trained import build_saved, describe_tokenizer, recall_tokenizer
from shared.training import Record, Trainer, TrainingFailed

from . import options

STYLE = "mingpt_style"
# nanoGPT's sizes for a CPU
SIZES: dict[str, Any] = {
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64,
}  # fmt: skip
RECIPE = Recipe()
SAMPLE = 300  # tokens written at the end


@dataclass
class Run:
    """A trainer and what must be written down about it."""

    folder: Path
    trainer: Trainer
    config: GPTConfig
    facts: dict[str, Any]
    tokenizer: Tokenizer
    new: bool

    @property
    def resume(self) -> str:
        """The command that goes on with it."""
        return f"gpt-duet train --resume {shlex.quote(str(self.folder))}"


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
        "dropout": dropout,
    }  # fmt: skip
    names = {"style": style, "dtype": dtype_name, "tokenizer": tokenizer_name}
    if (out is None) == (resume is None):
        raise ValueError(
            "give --out for a new run, or --resume for one to go on with"
        )
    device = own_device(options.choose_device(device_name))
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
        _work(run, Console(stderr=True, highlight=False))


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
    options.choose_dtype(dtype_name)
    chosen = Recipe(**{k: v for k, v in recipe.items() if v is not None})
    text, _ = options.choose_text(None, file)
    name = names["tokenizer"] or "char"
    tokenizer = load_tokenizer(name, text)
    if model["dropout"] is None:
        model["dropout"] = 0.0
    if preset is None:
        model = SIZES | {k: v for k, v in model.items() if v is not None}
    config = options.choose_config(preset, tokenizer, **model)
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
    built.to(device, options.choose_dtype(dtype_name))
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


def _work(run: Run, console: Console) -> None:
    """Train to the end, or until told to stop."""
    trainer, first = run.trainer, run.trainer.processes.first
    recipe = trainer.recipe
    device = next(trainer.model.parameters()).device
    _say(console, run)
    with _listen() as asked:
        if run.new and first:
            with new_folder(run.folder) as beside:
                save(beside, trainer, run.config, run.facts)
        with _progress(console, run) as show:
            while not trainer.done:
                try:
                    record = trainer.take_step()
                except TrainingFailed as error:
                    _fail(run, error)
                stop = trainer.processes.any(bool(asked), device)
                if not first:
                    if stop:
                        return
                    continue
                append_log(run.folder, record)
                show(record)
                if trainer.evaluates_at(record.step) or stop:
                    save(run.folder, trainer, run.config, run.facts)
                if stop and not trainer.done:
                    console.print(
                        f"stopped at step {record.step} of {recipe.steps} "
                        f"and saved; go on with: {run.resume}",
                        soft_wrap=True,
                    )
                    return
    if first:
        _finish(run, console)


def _fail(run: Run, error: TrainingFailed) -> None:
    message = f"{error}: stopped"
    if run.trainer.processes.first:
        last = last_checkpoint(run.folder)
        message += f"; the last good checkpoint is {last}"
    print(f"gpt-duet: {message}", file=sys.stderr)
    raise typer.Exit(1) from None


def _finish(run: Run, console: Console) -> None:
    """Draw the losses and write a sample."""
    log = read_log(run.folder)
    curves = {
        "train, each step": [(r["step"], r["train_loss"]) for r in log],
        "train": [
            (r["step"], r["train_estimate"])
            for r in log
            if "train_estimate" in r
        ],
        "validation": [
            (r["step"], r["val_loss"]) for r in log if "val_loss" in r
        ],
    }
    title = f"{run.facts['style']}, {run.folder.name}"
    draw_losses(run.folder / "loss.png", curves, title)
    trainer = run.trainer
    device = next(trainer.model.parameters()).device
    # what the text to be tested on begins with
    start = trainer.texts["val"][:1].reshape(1, 1)
    drawing = torch.Generator(device).manual_seed(trainer.recipe.seed)
    assert isinstance(trainer.model, LanguageModel)
    row = generate(
        trainer.model, start, SAMPLE, temperature=1.0, generator=drawing
    )
    text = run.tokenizer.decode(row[0].tolist())
    write_atomically(run.folder / "sample.txt", text + "\n")
    typer.echo(text)
    folder = shlex.quote(str(run.folder))
    console.print(
        f"log, loss curve, sample and checkpoints are in {run.folder}; let "
        f"it write with: gpt-duet generate --checkpoint {folder}",
        soft_wrap=True,
    )


def _say(console: Console, run: Run) -> None:
    trainer, config = run.trainer, run.config
    if not trainer.processes.first:
        return
    count = sum(p.numel() for p in trainer.model.parameters())
    lengths = [len(text) for text in trainer.texts.values()]
    text = run.facts["text"]
    console.print(
        f"model {run.facts['style']}: {config.n_layer} layers, "
        f"{config.n_head} heads, {config.n_embd} wide, block of "
        f"{config.block_size}; {count:,} parameters, {run.facts['dtype']}\n"
        f"text  {text['file'] or 'Python documentation'}: "
        f"{lengths[0]:,} tokens to learn from, {lengths[1]:,} to be tested "
        f"on ({run.facts['tokenizer']['name']}, {config.vocab_size} of them)",
        soft_wrap=True,
    )
    if not run.new:
        console.print(f"going on after step {trainer.step}")


@contextmanager
def _progress(console: Console, run: Run) -> Iterator[Any]:
    """Yield a function that shows a step: a bar, and evaluations as lines."""
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal or not run.trainer.processes.first,
    )
    task = bar.add_task("", total=run.trainer.recipe.steps)

    def show(record: Record) -> None:
        bar.update(
            task,
            completed=record.step,
            description=f"loss {record.train_loss:.3f}, "
            f"{record.tokens_per_second:,.0f} tokens/s",
        )
        if record.val_loss is not None:
            console.print(
                f"step {record.step:5}  train {record.train_estimate:.4f}  "
                f"validation {record.val_loss:.4f}  "
                f"{record.tokens_per_second:,.0f} tokens/s  "
                f"{record.seconds:.0f} s"
            )

    with bar:
        yield show


@contextmanager
def _listen() -> Iterator[list[int]]:
    """Yield a list that SIGTERM and Ctrl-C add to; a second one is obeyed."""
    asked: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        signal.signal(number, before[number])

    for heard in (signal.SIGTERM, signal.SIGINT):
        before[heard] = signal.signal(heard, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
