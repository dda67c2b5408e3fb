"""Resume a run of gpt-duet train, and train it to its end."""

import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from ..console import fail, show_facts
from ..files import new_folder, write_atomically
from ..notebooks import progress
from ..tokenization.texts import split_ids, text_stamp
from ..tokenization.tokenizers import Tokenizer, load_tokenizer
from ..training.lock import locked
from ..training.loss_curve import draw_losses
from ..training.processes import Processes
from ..training.recipe import Recipe
from ..training.run_folder import (
    Facts,
    append_log,
    change_steps,
    cut_log,
    last_checkpoint,
    open_run,
    read_log,
    resume,
    save,
)
from ..training.trainer import Trainer, TrainingFailed, draw_sample
from .choices import choose_text, describe

SAMPLE = 300  # tokens of the sample that is generated at the end
AT_RESUME = {"--resume", "--file", "--device", "--threads", "--steps"}


@dataclass
class Run:
    """A training run: its trainer, its folder, and the facts stored there."""

    folder: Path
    trainer: Trainer
    facts: Facts
    tokenizer: Tokenizer
    new: bool
    # the recipe before --resume changed the steps, else None
    former: Recipe | None = None


def resume_run(
    folder: Path,
    file: Path | None,
    given: Mapping[str, Any],
    device: torch.device,
    processes: Processes,
) -> Run:
    """Return a run in the state of its last checkpoint."""
    for option in given:
        if option not in AT_RESUME:
            raise ValueError(
                f"--resume keeps the run's settings: leave out {option}"
            )
    checkpoint, saved = open_run(folder)
    # a single checkpoint: a run's log and later steps are not in it
    if checkpoint == folder:
        raise ValueError(
            f"{folder} is a checkpoint: give --resume the folder of its run"
        )
    facts, former = saved.facts, None
    if file is None and facts.text_file is not None:
        file = Path(facts.text_file)
    text, source = choose_text(None, file)
    if text_stamp(text) != facts.text_sha256:
        raise ValueError(
            f"{source} is not the text of the run in {folder}: its sha256 is "
            f"{text_stamp(text)}, not {facts.text_sha256}"
        )
    steps = given.get("--steps", saved.recipe.steps)
    if steps != saved.recipe.steps:
        former = saved.recipe
        saved = change_steps(checkpoint, saved, steps)
    tokenizer = load_tokenizer(facts.tokenizer, facts.characters)
    ids = torch.tensor(tokenizer.encode(text), device=device)
    model = saved.build().to(device)
    trainer = Trainer(model, *split_ids(ids), saved.recipe, processes)
    resume(checkpoint, saved, trainer)
    if processes.first:
        cut_log(folder, saved.step)
    return Run(folder, trainer, facts, tokenizer, new=False, former=former)


def train_to_the_end(run: Run, held: ExitStack) -> None:
    """Take the remaining steps; end early on a signal to stop.

    If there are several processes, only the first one writes and prints. The
    folder of a new run stays locked until the caller closes `held`.
    """
    trainer, writes = run.trainer, run.trainer.processes.first
    console = Console(stderr=True, highlight=False, quiet=not writes)
    show_facts(console, _facts(run))
    if not run.new:
        done = ", its last: no step is left to train" * trainer.done
        change = _change(trainer, run.former) if run.former else ""
        console.print(f"resuming after step {trainer.step}{done}{change}")
    elif writes:
        with new_folder(run.folder) as beside:
            save(beside, trainer, run.facts)
        held.enter_context(locked(run.folder))
    steps = trainer.recipe.steps
    with _stop_signals() as signals, progress(steps, wanted=writes) as line:
        line.update(trainer.step)
        while not trainer.done:
            try:
                record = trainer.take_step()
            except TrainingFailed as error:
                last = last_checkpoint(run.folder)
                fail(
                    f"{error}: stopped; the last good checkpoint is {last}",
                    status=1,
                )
            device = trainer.texts["train"].device
            stop = trainer.processes.any(bool(signals), device)
            speed = f"{record.tokens_per_second:,.0f} tokens/s"
            words = f"loss {record.train_loss:.3f}, {speed}"
            line.set_description_str(words, refresh=False)
            line.update()
            if record.val_loss is not None:
                line.clear()
                console.print(
                    f"step {record.step:5}  train loss "
                    f"{record.train_estimate:.4f}  validation loss "
                    f"{record.val_loss:.4f}  {speed}  {record.seconds:.0f} s"
                )
            if writes:
                append_log(run.folder, record)
                if record.val_loss is not None or stop:
                    save(run.folder, trainer, run.facts)
            if stop and not trainer.done:
                line.clear()
                console.print(
                    f"stopped at step {record.step} of {steps} and saved; "
                    f"continue with: gpt-duet train --resume "
                    f"{_quoted(run.folder)}",
                    soft_wrap=True,
                )
                # exit with the status that a shell gives for the signal, even
                # if only another process received it
                raise typer.Exit(128 + (signals or [signal.SIGTERM])[0])
    if writes:
        _finish(run, console)


def _finish(run: Run, console: Console) -> None:
    """Draw the losses and write a sample."""
    log = read_log(run.folder)
    curves = {
        title: [
            (record.step, loss)
            for record in log
            if (loss := getattr(record, name)) is not None
        ]
        for title, name in (
            ("train, each step", "train_loss"),
            ("train", "train_estimate"),
            ("validation", "val_loss"),
        )
    }
    title = f"{run.facts.style}, {run.folder.name}"
    draw_losses(run.folder / "loss.png", curves, title)
    text = run.tokenizer.decode(draw_sample(run.trainer, SAMPLE))
    write_atomically(run.folder / "sample.txt", text + "\n")
    typer.echo(text)
    console.print(
        f"log, loss curve, sample and checkpoints are in {run.folder}; "
        "generate text with: gpt-duet generate --checkpoint "
        f"{_quoted(run.folder)}",
        soft_wrap=True,
    )


def _quoted(folder: Path) -> str:
    return shlex.quote(str(folder))


def _change(trainer: Trainer, former: Recipe) -> str:
    """Return a note on the new last step and the learning rate."""
    now, after = trainer.recipe, trainer.step
    before = f"; step {after} had {former.lr_at(after):.2g}" if after else ""
    return (
        f", to step {now.steps} instead of {former.steps}: the learning rate "
        f"follows the schedule of {now.steps} steps from here, "
        f"{now.lr_at(after + 1):.2g} at step {after + 1}{before}"
    )


def _facts(run: Run) -> dict[str, str]:
    trainer, facts, recipe = run.trainer, run.facts, run.trainer.recipe
    count = sum(p.numel() for p in trainer.model.parameters())
    train, val = map(len, trainer.texts.values())
    file = facts.text_file or "Python's documentation"
    return {
        "model": f"{facts.style}: {describe(trainer.config)}; {count:,} "
        f"parameters, {facts.dtype}",
        "text": f"{file}: {train:,} training tokens, {val:,} validation "
        f"tokens ({facts.tokenizer}, vocabulary {run.tokenizer.n_vocab:,})",
        "steps": f"{recipe.steps:,}; the learning rate rises to "
        f"{recipe.lr:g} in {recipe.warmup_steps} steps, then falls along half "
        f"a cosine to {recipe.lr_at(recipe.steps):g}",
    }


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C in a list; the second ends the program."""
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
