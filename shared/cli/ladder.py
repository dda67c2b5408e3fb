"""gpt-duet ladder: small models, each with one idea more, trained in turn."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from ..config import GPTConfig
from ..console import fail, progress, show_facts
from ..validation import require_parent
from . import options

LADDER = "..mingpt_style.ladder"
COLUMNS = ("model", "parameters", "validation loss", "seconds", "sample")
SAMPLE = 60  # characters
SHOWN = 20  # evaluations along the way, for the picture


def ladder(
    file: options.File = None,
    steps: options.Steps = 2000,
    batch_size: options.BatchSize = 32,
    lr: options.LearningRate = 1e-2,
    n_layer: Annotated[int, Option(help="Blocks of the last model.")] = 3,
    n_head: Annotated[int, Option(help="Heads, in models with several.")] = 4,
    n_embd: Annotated[int, Option(help="Width of the features.")] = 32,
    block_size: Annotated[int, Option(help="Longest sequence.")] = 8,
    eval_batches: options.EvalBatches = 200,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    out: Annotated[
        Path, Option(help="The picture of the losses, a PNG.")
    ] = Path("ladder.png"),
) -> None:
    """Train eight small models on one text, from a bigram table to a GPT.

    Each adds one idea to the one before, as in the lecture "Let's build
    GPT", and all are trained alike. Sizes are the lecture's: 8 characters
    of context, 32 features.
    """
    if out.suffix != ".png":
        raise ValueError(f"--out must end in .png, got {out}")
    require_parent(out)
    import torch

    from ..comparison.text import visible
    from ..invariants.model.threads import few_threads
    from ..tokenization.texts import split_ids
    from ..tokenization.tokenizers import load_tokenizer
    from ..training.loss_curve import draw_losses
    from ..training.recipe import Recipe
    from ..training.trainer import Trainer, TrainingFailed, draw_sample
    from .choices import choose_text

    recipe = Recipe(
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        eval_interval=max(1, steps // SHOWN),
        eval_batches=eval_batches,
        seed=seed,
    )
    text, source = choose_text(None, file)
    tokenizer = load_tokenizer("char", text)
    config = GPTConfig(
        tokenizer.n_vocab, block_size, n_layer, n_head, n_embd, dropout=0.0
    )
    parts = split_ids(torch.tensor(tokenizer.encode(text)))
    console = Console(stderr=True, highlight=False)
    facts = {
        "text": f"{source}: {len(parts[0]):,} training characters, "
        f"{len(parts[1]):,} validation characters, vocabulary "
        f"{config.vocab_size}",
        "steps": f"{steps} for each model, of {batch_size} windows of "
        f"{block_size} characters",
    }
    show_facts(console, facts)
    models = importlib.import_module(LADDER, __package__).RUNGS
    widths = (-max(map(len, models)), 10, 15, 7, 0)
    typer.echo(_row(widths, *COLUMNS))
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, build in models.items():
        torch.manual_seed(seed)
        trainer = Trainer(build(config), *parts, recipe)
        curve = curves[name] = []
        count = sum(p.numel() for p in trainer.model.parameters())
        with (
            progress(console, steps) as show,
            few_threads(count, batch_size * block_size, threads),
        ):
            while not trainer.done:
                try:
                    record = trainer.take_step()
                except TrainingFailed as error:
                    fail(f"{name}: {error}; try a smaller --lr", status=1)
                if record.val_loss is not None:
                    curve.append((float(record.step), record.val_loss))
                show(record.step, name)
            sample = tokenizer.decode(draw_sample(trainer, SAMPLE)[1:])
        loss, took = f"{curve[-1][1]:.3f}", f"{trainer.seconds:.0f}"
        shown = visible(" ".join(sample.split()))
        typer.echo(_row(widths, name, f"{count:,}", loss, took, shown))
    draw_losses(out, curves, f"the ladder: validation loss, {steps} steps")
    console.print(f"the losses by step are drawn in {out}")


def _row(widths: Sequence[int], *cells: str) -> str:
    """Return a row of the table; a negative width aligns to the left."""
    pairs = zip(widths, cells, strict=True)
    return "  ".join("%*s" % pair for pair in pairs)  # noqa: UP031
