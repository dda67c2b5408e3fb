"""gpt-duet ladder: train small models, each with one more idea."""

import importlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from ..config import GPTConfig
from ..console import fail, show_facts
from ..files import write_atomically
from ..notebooks import progress
from ..validation import require_different, require_parent
from . import options

if TYPE_CHECKING:  # for annotations only: these modules import torch
    from torch import Tensor

    from ..tokenization.tokenizers import Tokenizer
    from ..training.recipe import Recipe

LADDER = "..mingpt_style.ladder"
COLUMNS = ("model", "parameters", "validation loss", "seconds", "sample")
SAMPLE = 240  # characters of a sample
PRINTED = 60  # characters of a sample that the table shows
# steps of each model that are timed first, to estimate the whole time
TRIED = 5
QUICK = 300, 10  # with --quick: steps, and batches of an evaluation
SHOWN = 20  # how many evaluations during training give the curve's points


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
    quick: Annotated[
        bool,
        Option(
            help="Train for about a minute on 2 cores: 300 steps and 10 "
            "evaluation batches. Overrides --steps and --eval-batches."
        ),
    ] = False,
    out: Annotated[
        Path, Option(help="The picture of the losses, a PNG.")
    ] = Path("ladder.png"),
    html_file: Annotated[
        Path | None,
        Option(
            "--html",
            help="Also write a page with the new lines of code, the loss and "
            "a sample of each model.",
        ),
    ] = None,
) -> None:
    """Train eight small models on one text, from a bigram table to a GPT.

    Each model adds one idea to the previous model, as in the lecture "Let's
    build GPT", and all are trained alike. Sizes are the lecture's: 8
    characters of context, 32 features.
    """
    if quick:
        steps, eval_batches = QUICK
    if out.suffix != ".png":
        raise ValueError(f"--out must end in .png, got {out}")
    require_parent(out)
    require_parent(html_file)
    require_different({"out": out, "html": html_file}, file=file)
    import torch

    from ..tokenization.texts import split_ids
    from ..tokenization.tokenizers import load_tokenizer
    from ..training.recipe import Recipe
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
    facts = {
        "text": f"{source}: {len(parts[0]):,} training characters, "
        f"{len(parts[1]):,} validation characters, vocabulary "
        f"{config.vocab_size}",
        "training steps": f"{steps} for each model; each step uses "
        f"{batch_size} windows of {block_size} characters",
    }
    _climb(config, recipe, parts, tokenizer, facts, threads, out, html_file)


def _climb(
    config: GPTConfig,
    recipe: "Recipe",
    parts: "tuple[Tensor, Tensor]",
    tokenizer: "Tokenizer",
    facts: dict[str, str],
    threads: int | None,
    out: Path,
    html_file: Path | None,
) -> None:
    """Train each model in turn; print its results, then draw and write all."""
    import torch

    from ..comparison.page.ladder import Climbed, render_ladder
    from ..comparison.text import visible
    from ..running.context import few_threads
    from ..training.loss_curve import draw_losses
    from ..training.trainer import Trainer, TrainingFailed, draw_sample

    models = importlib.import_module(LADDER, __package__).RUNGS
    console = Console(stderr=True, highlight=False)
    window = recipe.batch_size * config.block_size

    def start(build: Any) -> tuple[Trainer, int]:
        torch.manual_seed(recipe.seed)
        trainer = Trainer(build(config), *parts, recipe)
        return trainer, sum(p.numel() for p in trainer.model.parameters())

    # counted in steps of training: a forward pass takes a third of a step
    evaluations = SHOWN * 2 * recipe.eval_batches / 3
    expected = 0.0
    for build in models.values():
        trainer, count = start(build)
        with few_threads(count, window, threads), suppress(TrainingFailed):
            for _ in range(min(TRIED, recipe.steps - 1)):
                trainer.take_step()
        if trainer.step:
            each = trainer.seconds / trainer.step
            expected += each * (recipe.steps + evaluations)
    estimate = f"about {_duration(expected)} in all"
    show_facts(console, facts | {"time": estimate})
    widths = (-max(map(len, models)), 10, 15, 7, 0)
    typer.echo(_row(widths, *COLUMNS))

    def climb(name: str, build: Any) -> Climbed:
        trainer, count = start(build)
        curve: list[tuple[float, float]] = []
        with (
            progress(recipe.steps) as line,
            few_threads(count, window, threads),
        ):
            line.set_description_str(name)
            while not trainer.done:
                try:
                    record = trainer.take_step()
                except TrainingFailed as error:
                    fail(f"{name}: {error}; try a smaller --lr", status=1)
                if record.val_loss is not None:
                    curve.append((float(record.step), record.val_loss))
                line.update()
            sample = tokenizer.decode(draw_sample(trainer, SAMPLE)[1:])
        rung = Climbed(name, build, count, curve, trainer.seconds, sample)
        shown = visible(" ".join(sample[:PRINTED].split()))
        cells = f"{count:,}", f"{rung.loss:.3f}", f"{rung.seconds:.0f}"
        typer.echo(_row(widths, name, *cells, shown))
        return rung

    climbed: list[Climbed] = []
    stopped = False
    try:
        for name, build in models.items():
            climbed.append(climb(name, build))
    except KeyboardInterrupt:
        stopped = True
    if climbed:
        curves = {rung.name: rung.curve for rung in climbed}
        title = f"the ladder: validation loss, {recipe.steps} steps"
        draw_losses(out, curves, title)
        console.print(f"the losses by step are drawn in {out}")
        if html_file is not None:
            write_atomically(html_file, render_ladder(climbed, facts))
            console.print(f"page: {html_file}", soft_wrap=True, markup=False)
    if stopped:
        raise KeyboardInterrupt


def _duration(seconds: float) -> str:
    """Return seconds in words, as coarsely as an estimate needs."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min"


def _row(widths: Sequence[int], *cells: str) -> str:
    """Return a row of the table; a negative width aligns to the left."""
    pairs = zip(widths, cells, strict=True)
    return "  ".join("%*s" % pair for pair in pairs)  # noqa: UP031
