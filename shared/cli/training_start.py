"""Where a training starts: anew, from weights, or from its checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..protocol import LanguageModel, load_style
from ..tokenization.texts import split_ids, text_stamp
from ..tokenization.tokenizers import Tokenizer, load_tokenizer
from ..training.log import cut_log
from ..training.processes import Processes
from ..training.recipe import Recipe
from ..training.resume import (
    build_saved,
    describe_tokenizer,
    open_run,
    recall_tokenizer,
)
from ..training.trainer import Trainer
from ..validation import choose_dtype
from .choices import ModelOptions, choose_config, choose_start, choose_text
from .training_loop import Run

SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}


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
    load_style(style)
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
        model = load_style(style).build_model(config)
    else:
        if tie_weights is not None:
            raise ValueError("--from brings its own head")
        weights = choose_start(start, sizes, tokenizer, tokenizer_name)
        config = weights.config.replace(dropout=dropout)
        # as the style builds it anew
        parts = getattr(load_style(style), "ORIGINAL_PARTS", {})
        wide = {name: t.float() for name, t in weights.state.items()}
        model = load_style(style).from_gpt2(wide, config, **parts)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"style {style!r} builds no language model")
    facts = {
        "style": style,
        "dtype": dtype_name,
        "text": {
            "file": None if file is None else str(file.absolute()),
            "sha256": text_stamp(text),
        },
        "tokenizer": describe_tokenizer(tokenizer_name, tokenizer),
    }
    model.to(device, dtype)
    trainer = Trainer(
        model, *split(tokenizer, text, device), recipe, processes
    )
    return Run(out, trainer, config, facts, tokenizer, new=True)


def resume_run(
    folder: Path,
    file: Path | None,
    given: Mapping[str, Any],
    device: torch.device,
    processes: Processes,
) -> Run:
    """Return a run as its last checkpoint has it.

    Options that contradict its beginning are refused, and another text.
    """
    if "--preset" in given:
        raise ValueError("--resume brings its sizes: leave --preset out")
    saved = open_run(folder)
    if saved.folder == folder:  # its log and later steps are elsewhere
        raise ValueError(
            f"{folder} is one checkpoint: --resume takes its run's folder, "
            f"and goes on from the newest that is there"
        )
    facts = saved.facts
    start = asdict(saved.recipe) | asdict(saved.config)
    start |= {"style": facts["style"], "dtype": facts["dtype"]}
    start |= {"tokenizer": facts["tokenizer"]["name"]}
    for option, value in given.items():
        name = option.removeprefix("--").replace("-", "_")
        if name in start and value != start[name]:
            raise ValueError(
                f"{option} is {value}, but the run in {folder} has "
                f"{start[name]}: a resumed run keeps to its start"
            )
    known = facts["text"]["file"]
    if file is None and known is not None:
        file = Path(known)
    text, source = choose_text(None, file)
    if text_stamp(text) != facts["text"]["sha256"]:
        raise ValueError(
            f"{source} is not the text of the run in {folder}: its sha256 is "
            f"{text_stamp(text)}, not {facts['text']['sha256']}"
        )
    tokenizer = recall_tokenizer(facts["tokenizer"])
    model = build_saved(saved).to(device)
    parts = split(tokenizer, text, device)
    trainer = Trainer(model, *parts, saved.recipe, processes)
    saved.load_trainer(trainer)
    if processes.first:
        cut_log(folder, saved.step)
    return Run(folder, trainer, saved.config, facts, tokenizer, new=False)


def split(
    tokenizer: Tokenizer, text: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of a text, those to learn from and those to test on."""
    return split_ids(torch.tensor(tokenizer.encode(text), device=device))
