"""gpt-duet ladder: the lecture's rungs, trained one after another."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text as RichText

from ..config import GPTConfig
from ..tokenization.texts import split_ids
from ..tokenization.tokenizers import Tokenizer, load_tokenizer
from ..training.loss_curve import Points, draw_losses
from ..training.recipe import Recipe
from ..training.trainer import Trainer, TrainingFailed, draw_sample
from ..validation import require_parent
from . import options

LADDER = "mingpt_style.ladder"
SAMPLE = 60  # characters
SHOWN = 20  # evaluations along the way, for the picture


@dataclass(frozen=True)
class Climbed:
    """One rung after its training."""

    name: str
    parameters: int
    val_loss: float
    seconds: float
    sample: str
    curve: Points


def ladder(
    file: options.File = None,
    steps: Annotated[
        int, typer.Option("--steps", help="Updates of each rung.")
    ] = 2000,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Windows a step.")
    ] = 32,
    lr: Annotated[
        float, typer.Option("--lr", help="Highest learning rate.")
    ] = 1e-2,
    n_layer: Annotated[
        int, typer.Option("--n-layer", help="Blocks of the last rung.")
    ] = 3,
    n_head: Annotated[
        int, typer.Option("--n-head", help="Heads where there are many.")
    ] = 4,
    n_embd: Annotated[
        int, typer.Option("--n-embd", help="Width of the features.")
    ] = 32,
    block_size: Annotated[
        int, typer.Option("--block-size", help="Longest sequence.")
    ] = 8,
    eval_batches: Annotated[
        int, typer.Option("--eval-batches", help="Batches of an evaluation.")
    ] = 200,
    seed: Annotated[
        int, typer.Option("--seed", help="Of weights and batches.")
    ] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="The picture of the losses, a PNG.")
    ] = Path("ladder.png"),
) -> None:
    """Climb from a bigram table to a GPT, on one text with one budget.

    Sizes are the lecture's: 8 characters of context, 32 features.
    """
    if out.suffix != ".png":
        raise ValueError(f"--out must end in .png, got {out}")
    require_parent(out)
    recipe = Recipe(
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        eval_interval=max(1, steps // SHOWN),
        eval_batches=eval_batches,
        seed=seed,
    )
    text, source = options.choose_text(None, file)
    tokenizer = load_tokenizer("char", text)
    config = GPTConfig(
        tokenizer.n_vocab, block_size, n_layer, n_head, n_embd, dropout=0.0
    )
    parts = split_ids(torch.tensor(tokenizer.encode(text)))
    console = Console(stderr=True, highlight=False)
    console.print(
        f"text  {source}: {len(parts[0]):,} characters to learn from, "
        f"{len(parts[1]):,} to be tested on, {config.vocab_size} of them\n"
        f"each  {steps} steps of {batch_size} windows of {block_size}",
        soft_wrap=True,
    )
    rungs = importlib.import_module(LADDER).RUNGS
    climbed = []
    with Progress(console=console, transient=True) as bar:
        bar.disable = not console.is_terminal
        task = bar.add_task("", total=steps * len(rungs))
        for name, rung in rungs.items():
            bar.update(task, description=name)
            torch.manual_seed(seed)
            trainer = Trainer(rung(config), *parts, recipe)
            climbed.append(_climb(name, trainer, tokenizer, bar, task))
    Console().print(_table(climbed))
    curves = {rung.name: rung.curve for rung in climbed}
    draw_losses(out, curves, f"the ladder: validation loss, {steps} steps")
    console.print(f"the losses by step are in {out}")


def _climb(
    name: str,
    trainer: Trainer,
    tokenizer: Tokenizer,
    bar: Progress,
    task: TaskID,
) -> Climbed:
    curve = []
    while not trainer.done:
        try:
            record = trainer.take_step()
        except TrainingFailed as error:
            bar.stop()
            message = f"{name}: {error}; try a smaller --lr"
            print(f"gpt-duet: {message}", file=sys.stderr)
            raise typer.Exit(1) from None
        bar.advance(task)
        if record.val_loss is not None:
            curve.append((float(record.step), record.val_loss))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    sample = tokenizer.decode(draw_sample(trainer, SAMPLE)[1:])
    return Climbed(
        name, parameters, curve[-1][1], trainer.seconds, sample, curve
    )


def _table(climbed: list[Climbed]) -> Table:
    table = Table(box=None, header_style="bold cyan", padding=(0, 2, 0, 0))
    table.add_column("rung", no_wrap=True)
    for column in ("parameters", "validation", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("writes", overflow="fold")
    for rung in climbed:
        table.add_row(
            rung.name,
            f"{rung.parameters:,}",
            f"{rung.val_loss:.3f}",
            f"{rung.seconds:.0f}",
            RichText(_one_line(rung.sample)),
        )
    return table


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
