"""gpt-duet train: train a model on a text; the run can be resumed."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..console import given_options
from ..files import require_new_folder
from ..validation import choose_device, choose_dtype
from . import options

SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}


def train(
    context: typer.Context,
    style: options.Style = "mingpt_style",
    out: Annotated[
        Path | None, Option(help="A new folder for the run.")
    ] = None,
    resume: Annotated[
        Path | None, Option(help="Continue the run in this folder.")
    ] = None,
    start: Annotated[
        str | None,
        Option(
            "--from",
            help='Start from trained weights: "default" (the small model of '
            "the kit, with its tokenizer), or a folder as for --weights.",
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
    dropout: Annotated[float, Option(help="Probability of dropout.")] = 0.0,
    tie_weights: Annotated[
        bool | None,
        Option(
            "--tie-weights/--no-tie-weights",
            help="Whether head and token embedding are one matrix, if the "
            "style supports it. Default: that of --preset, otherwise not.",
        ),
    ] = None,
    steps: options.Steps = 2000,
    batch_size: options.BatchSize = 12,
    lr: options.LearningRate = 1e-3,
    eval_interval: Annotated[
        int,
        Option(help="Steps between evaluations, which save a checkpoint."),
    ] = 250,
    eval_batches: options.EvalBatches = 100,
    dtype_name: options.Dtype = "float32",
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Train a model on a text, in either style.

    The folder gets a log, the last two checkpoints, and at the end a loss
    curve and a sample. Ctrl-C and SIGTERM save a checkpoint first (status 130
    and 143). --resume then continues as if the run had not been stopped; with
    --steps, it continues to another last step, and the learning rate follows
    the schedule for that number of steps. For several processes:
    torchrun --nproc-per-node 2 -m gpt_duet train ...
    """
    if (out is None) == (resume is None):
        raise ValueError(
            "give --out for a new run, or --resume to continue a run"
        )
    import torch

    from ..checkpoint import SMALL_MODEL
    from ..protocol import load_style
    from ..running.context import few_threads
    from ..tokenization.texts import split_ids, text_stamp
    from ..tokenization.tokenizers import load_tokenizer
    from ..training.lock import locked
    from ..training.processes import join_processes, own_device
    from ..training.recipe import Recipe
    from ..training.run_folder import Facts, last_checkpoint
    from ..training.trainer import Trainer
    from . import choices
    from .train_loop import Run, resume_run, train_to_the_end

    given = given_options(context)
    device = own_device(choose_device(device_name))
    with join_processes(device) as processes, ExitStack() as held:
        if resume is not None:
            last_checkpoint(resume)
            if processes.first:
                held.enter_context(locked(resume))
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
            package, dtype = load_style(style), choose_dtype(dtype_name)
            if start == "default" and "--tokenizer" not in given:
                tokenizer_name = options.TOKENIZER
            text, _ = choices.choose_text(None, file)
            tokenizer = load_tokenizer(tokenizer_name, text)
            sizes = choices.ModelOptions(
                preset, n_layer, n_head, n_embd, block_size, activation
            )
            torch.manual_seed(seed)
            if start is None:
                config = choices.choose_config(
                    sizes, tokenizer, SIZES,
                    dropout=dropout, tie_weights=tie_weights,
                )  # fmt: skip
                # the tokenizer's number of tokens: a preset may have more
                config = config.replace(vocab_size=tokenizer.n_vocab)
                model = package.build_model(config)
            elif tie_weights is not None:
                raise ValueError(
                    "--from determines the head: leave out --tie-weights"
                )
            else:
                folder = SMALL_MODEL if start == "default" else Path(start)
                weights = choices.load_weights(
                    folder, sizes, tokenizer, tokenizer_name, "--from"
                )
                model = package.from_gpt2(
                    weights.to(torch.device("cpu"), torch.float32),
                    weights.config.replace(dropout=dropout),
                    # build the style's own parts, so that a resumed run has
                    # the same parts
                    **getattr(package, "ORIGINAL_PARTS", {}),
                )
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
            run = Run(out, trainer, facts, tokenizer, new=True)
        trainer = run.trainer
        size = sum(p.numel() for p in trainer.model.parameters())
        window = trainer.recipe.batch_size * trainer.config.block_size
        with few_threads(size, window, threads):
            train_to_the_end(run, held)
