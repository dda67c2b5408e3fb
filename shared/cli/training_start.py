"""Where a training starts: from weights, or from its own last checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import GPTConfig
from ..protocol import load_style
from ..tokenization.texts import split_ids, text_stamp
from ..tokenization.tokenizers import Tokenizer
from ..training import (
    Processes,
    Trainer,
    build_saved,
    cut_log,
    open_run,
    recall_tokenizer,
)
from .choices import choose_text
from .training_loop import Run


def continue_from(
    name: str, state: Mapping[str, torch.Tensor], config: GPTConfig
) -> torch.nn.Module:
    """Return a style's own model with these weights, as it builds one anew."""
    style = load_style(name)
    parts = getattr(style, "ORIGINAL_PARTS", {})
    wide = {key: tensor.float() for key, tensor in state.items()}
    return style.from_gpt2(wide, config, **parts)


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
