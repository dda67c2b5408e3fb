"""What gpt-duet train does: a run begun or resumed, and its loop."""

import shlex
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from ..console import fail, progress, show_facts
from ..files import new_folder, write_atomically
from ..protocol import LanguageModel, load_style
from ..tokenization.texts import split_ids, text_stamp
from ..tokenization.tokenizers import Tokenizer, load_tokenizer
from ..training.loss_curve import draw_losses
from ..training.processes import Processes
from ..training.recipe import Recipe
from ..training.run_folder import (
    Facts,
    append_log,
    cut_log,
    last_checkpoint,
    open_run,
    read_log,
    resume,
    save,
)
from ..training.trainer import Record, Trainer, TrainingFailed, draw_sample
from ..validation import choose_dtype
from .choices import (
    ModelOptions,
    choose_config,
    choose_start,
    choose_text,
    describe,
)

SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
SAMPLE = 300  # tokens written at the end
AT_RESUME = {"--resume", "--file", "--device", "--threads"}


@dataclass
class Run:
    """A trainer, its folder, and what is written down about it."""

    folder: Path
    trainer: Trainer
    facts: Facts
    tokenizer: Tokenizer
    new: bool


def start_run(
    out: Path,
    recipe: Recipe,
    file: Path | None,
    tokenizer_name: str,
    device: torch.device,
    processes: Processes,
    *,
    style: str,
    start: str | None,
    sizes: ModelOptions,
    dropout: float,
    tie_weights: bool | None,
    dtype_name: str,
) -> Run:
    """Return a new run: of a model drawn at random, or of trained weights."""
    package = load_style(style)
    dtype = choose_dtype(dtype_name)
    text, _ = choose_text(None, file)
    tokenizer = load_tokenizer(tokenizer_name, text)
    torch.manual_seed(recipe.seed)
    if start is None:
        config = choose_config(
            sizes, tokenizer, SIZES, dropout=dropout, tie_weights=tie_weights
        )
        # a preset may have room for more tokens than can be written
        config = config.replace(vocab_size=tokenizer.n_vocab)
        model = package.build_model(config)
    else:
        if tie_weights is not None:
            raise ValueError("--from brings its own head")
        weights = choose_start(start, sizes, tokenizer, tokenizer_name)
        config = weights.config.replace(dropout=dropout)
        # as the style builds it anew
        parts = getattr(package, "ORIGINAL_PARTS", {})
        model = package.from_gpt2(
            weights.to(torch.device("cpu"), torch.float32), config, **parts
        )
    if not isinstance(model, LanguageModel):
        raise ValueError(f"style {style!r} builds no language model")
    facts = Facts(
        style=style,
        dtype=dtype_name,
        tokenizer=tokenizer_name,
        characters=getattr(tokenizer, "characters", None),
        text_file=None if file is None else str(file.absolute()),
        text_sha256=text_stamp(text),
    )
    ids = torch.tensor(tokenizer.encode(text), device=device)
    model.to(device, dtype)
    trainer = Trainer(model, *split_ids(ids), recipe, processes)
    return Run(out, trainer, facts, tokenizer, new=True)


def resume_run(
    folder: Path,
    file: Path | None,
    given: Collection[str],
    device: torch.device,
    processes: Processes,
) -> Run:
    """Return a run as its last checkpoint has it."""
    for option in given:
        if option not in AT_RESUME:
            raise ValueError(
                f"--resume goes on as the run began: leave {option} out"
            )
    saved = open_run(folder)
    if last_checkpoint(folder) == folder:  # its log and later steps elsewhere
        raise ValueError(
            f"{folder} is one checkpoint: --resume takes its run's folder"
        )
    facts = saved.facts
    if file is None and facts.text_file is not None:
        file = Path(facts.text_file)
    text, source = choose_text(None, file)
    if text_stamp(text) != facts.text_sha256:
        raise ValueError(
            f"{source} is not the text of the run in {folder}: its sha256 is "
            f"{text_stamp(text)}, not {facts.text_sha256}"
        )
    tokenizer = facts.load_tokenizer()
    ids = torch.tensor(tokenizer.encode(text), device=device)
    model = saved.build().to(device)
    trainer = Trainer(model, *split_ids(ids), saved.recipe, processes)
    resume(folder, saved, trainer)
    if processes.first:
        cut_log(folder, saved.step)
    return Run(folder, trainer, facts, tokenizer, new=False)


def train_to_the_end(run: Run) -> None:
    """Take all steps that are left, or those until a signal to stop.

    Of several processes the first alone writes and prints.
    """
    trainer, writes = run.trainer, run.trainer.processes.first
    console = Console(stderr=True, highlight=False, quiet=not writes)
    show_facts(console, _facts(run))
    if not run.new:
        done = ", its last: nothing is left to train" * trainer.done
        console.print(f"resuming after step {trainer.step}{done}")
    elif writes:
        with new_folder(run.folder) as beside:
            save(beside, trainer, run.facts)
    steps = trainer.recipe.steps
    with _stop_signals() as signals, progress(console, steps) as show:
        while not trainer.done:
            record = _step(run)
            device = trainer.texts["train"].device
            stop = trainer.processes.any(bool(signals), device)
            speed = f"{record.tokens_per_second:,.0f} tokens/s"
            show(record.step, f"loss {record.train_loss:.3f}, {speed}")
            if record.val_loss is not None:
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
                console.print(
                    f"stopped at step {record.step} of {steps} and saved; go "
                    f"on with: gpt-duet train --resume {_quoted(run.folder)}",
                    soft_wrap=True,
                )
                # as a shell reports it; another process may have got it
                raise typer.Exit(128 + (signals or [signal.SIGTERM])[0])
    if writes:
        _finish(run, console)


def _step(run: Run) -> Record:
    try:
        return run.trainer.take_step()
    except TrainingFailed as error:
        last = last_checkpoint(run.folder)
        fail(f"{error}: stopped; the last good checkpoint is {last}", status=1)


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


def _facts(run: Run) -> dict[str, str]:
    trainer, facts = run.trainer, run.facts
    count = sum(p.numel() for p in trainer.model.parameters())
    train, val = map(len, trainer.texts.values())
    file = facts.text_file or "Python's documentation"
    return {
        "model": f"{facts.style}: {describe(trainer.config)}; {count:,} "
        f"parameters, {facts.dtype}",
        "text": f"{file}: {train:,} training tokens, {val:,} validation "
        f"tokens ({facts.tokenizer}, vocabulary {run.tokenizer.n_vocab:,})",
    }


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
