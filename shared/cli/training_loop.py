"""The loop of gpt-duet train: progress, checkpoints, stopping, the end."""

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ..config import GPTConfig
from ..console import fail, progress, show_facts
from ..files import new_folder, write_atomically
from ..tokenization.tokenizers import Tokenizer
from ..training.log import append_log, read_log
from ..training.loss_curve import draw_losses
from ..training.run_folder import last_checkpoint, save
from ..training.trainer import Record, Trainer, TrainingFailed, draw_sample
from .choices import describe

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

    def save(self, folder: Path) -> None:
        """Write a checkpoint below a folder."""
        save(folder, self.trainer, self.config, self.facts)


def train_to_the_end(run: Run, console: Console) -> None:
    """Take all steps that are left, or those until a signal to stop.

    Of several processes the first alone writes and prints.
    """
    with _stop_signals() as signals:
        if not run.trainer.processes.first:
            while not run.trainer.done and not _step(run, signals)[1]:
                pass
            return
        show_facts(console, _facts(run))
        if run.new:
            with new_folder(run.folder) as beside:
                run.save(beside)
        else:
            done = ", its last: nothing is left to train" * run.trainer.done
            console.print(f"resuming after step {run.trainer.step}{done}")
        if not _take_steps(run, signals, console):
            # as a shell reports it; another process may have got the signal
            raise typer.Exit(128 + (signals or [signal.SIGTERM])[0])
    _finish(run, console)


def _take_steps(run: Run, signals: list[int], console: Console) -> bool:
    """Take the steps, log and save; return False where a signal came."""
    trainer, steps = run.trainer, run.trainer.recipe.steps
    with progress(console, steps) as show:
        while not trainer.done:
            record, stop = _step(run, signals)
            append_log(run.folder, record)
            show(
                record.step,
                f"loss {record.train_loss:.3f}, "
                f"{record.tokens_per_second:,.0f} tokens/s",
            )
            if record.val_loss is not None:
                console.print(_evaluation(record))
            if trainer.evaluates_at(record.step) or stop:
                run.save(run.folder)
            if stop and not trainer.done:
                console.print(
                    f"stopped at step {record.step} of {steps} and saved; "
                    f"go on with: {run.resume}",
                    soft_wrap=True,
                )
                return False
    return True


def _step(run: Run, signals: list[int]) -> tuple[Record, bool]:
    """Take a step; return it, and whether any process got a signal."""
    trainer = run.trainer
    try:
        record = trainer.take_step()
    except TrainingFailed as error:
        message = f"{error}: stopped"
        if trainer.processes.first:
            last = last_checkpoint(run.folder)
            message += f"; the last good checkpoint is {last}"
        fail(message, status=1)
    device = next(trainer.model.parameters()).device
    return record, trainer.processes.any(bool(signals), device)


def _finish(run: Run, console: Console) -> None:
    """Draw the losses and write a sample."""
    log = read_log(run.folder)
    curves = {
        title: [(r["step"], r[name]) for r in log if name in r]
        for title, name in (
            ("train, each step", "train_loss"),
            ("train", "train_estimate"),
            ("validation", "val_loss"),
        )
    }
    title = f"{run.facts['style']}, {run.folder.name}"
    draw_losses(run.folder / "loss.png", curves, title)
    text = run.tokenizer.decode(draw_sample(run.trainer, SAMPLE))
    write_atomically(run.folder / "sample.txt", text + "\n")
    typer.echo(text)
    folder = shlex.quote(str(run.folder))
    console.print(
        f"log, loss curve, sample and checkpoints are in {run.folder}; "
        f"generate text with: gpt-duet generate --checkpoint {folder}",
        soft_wrap=True,
    )


def _facts(run: Run) -> dict[str, str]:
    count = sum(p.numel() for p in run.trainer.model.parameters())
    train, val = map(len, run.trainer.texts.values())
    file = run.facts["text"]["file"] or "Python's documentation"
    return {
        "model": f"{run.facts['style']}: {describe(run.config)}; {count:,} "
        f"parameters, {run.facts['dtype']}",
        "text": f"{file}: {train:,} training tokens, {val:,} validation "
        f"tokens ({run.facts['tokenizer']['name']}, vocabulary "
        f"{run.config.vocab_size:,})",
    }


def _evaluation(record: Record) -> str:
    return (
        f"step {record.step:5}  train loss {record.train_estimate:.4f}  "
        f"validation loss {record.val_loss:.4f}  "
        f"{record.tokens_per_second:,.0f} tokens/s  {record.seconds:.0f} s"
    )


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C in a list; a second one ends the program."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for heard in (signal.SIGTERM, signal.SIGINT):
        before[heard] = signal.signal(heard, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
