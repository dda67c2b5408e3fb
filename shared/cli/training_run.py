"""What gpt-duet train does once it knows what to do."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ..config import GPTConfig
from ..files import new_folder, write_atomically
from ..tokenization.tokenizers import Tokenizer
from ..training import (
    Record,
    Trainer,
    TrainingFailed,
    append_log,
    draw_losses,
    draw_sample,
    last_checkpoint,
    read_log,
    save,
)

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


def work(run: Run, console: Console) -> None:
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
    text = run.tokenizer.decode(draw_sample(run.trainer, SAMPLE))
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
    train, val = map(len, trainer.texts.values())
    file = run.facts["text"]["file"] or "Python documentation"
    tokenizer = run.facts["tokenizer"]["name"]
    console.print(
        f"model {run.facts['style']}: {config.n_layer} layers, "
        f"{config.n_head} heads, {config.n_embd} wide, block of "
        f"{config.block_size}; {count:,} parameters, {run.facts['dtype']}\n"
        f"text  {file}: {train:,} tokens to learn from, {val:,} to be "
        f"tested on ({tokenizer}, {config.vocab_size:,} of them)",
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
