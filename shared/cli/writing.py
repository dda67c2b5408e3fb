"""What generate writes, and from what: model, tokenizer, sampling, text."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from torch import nn

from ..checkpoint import Checkpoint
from ..comparison.text import visible
from ..generation import Sampler, TextStream
from ..tokenization.texts import text_stamp
from ..tokenization.tokenizers import Tokenizer, load_tokenizer
from ..training.resume import load_trained
from .choices import choose_text


@dataclass(frozen=True)
class Chosen:
    """A model with its tokenizer, and where both are from, in words."""

    model: nn.Module
    style: str
    weights: str
    tokenizer: Tokenizer
    tokenizer_name: str
    characters: str = ""


def choose_trained(folder: Path, given: Mapping[str, object]) -> Chosen:
    """Return what a training run has learnt, in its style or another."""
    own = ("--tokenizer", "--file", "--weights", "--preset", "--n-layer",
           "--n-head", "--n-embd", "--block-size", "--activation")  # fmt: skip
    for option in own:
        if option in given:
            raise ValueError(
                f"--checkpoint brings its own: leave {option} out"
            )
    style = given.get("--style")
    model, tokenizer, run = load_trained(
        folder, None if style is None else str(style)
    )
    return Chosen(
        model,
        str(style or run.facts["style"]),
        f"{run.folder}, after {run.step} of {run.recipe.steps} steps",
        tokenizer,
        run.facts["tokenizer"]["name"],
    )


def choose_tokenizer(name: str, file: Path | None) -> tuple[Tokenizer, str]:
    """Return the tokenizer, and in words where its characters are from."""
    if name != "char":
        if file is not None:
            raise ValueError(f"--file is for --tokenizer char, not for {name}")
        return load_tokenizer(name), ""
    text, source = choose_text(None, file)
    origin = f" from {source}, sha256 {text_stamp(text)}"
    return load_tokenizer(name, text), origin


def for_writing(checkpoint: Checkpoint, n_vocab: int) -> Checkpoint:
    """Leave out the tokens for which the tokenizer has no text."""
    rows = checkpoint.config.vocab_size
    if rows == n_vocab:
        return checkpoint
    return checkpoint.cut(
        n_vocab, f"the preset's {rows:,} tokens cut to {n_vocab:,}"
    )


def describe_lengths(rows: list[list[int]], block_size: int) -> str:
    """Say how many prompts there are, and how long they are."""
    lengths = sorted({len(row) for row in rows})
    words = " and ".join(map(str, lengths))
    if len(lengths) > 3:
        words = f"{lengths[0]} to {lengths[-1]}"
    seen = ""
    if lengths[-1] > block_size:
        seen = f"; the model sees the last {block_size}"
    return f"{len(rows)}, of {words} tokens{seen}"


def describe_sampler(sampler: Sampler, seed: int) -> str:
    """Say how the next token is chosen."""
    if sampler.temperature == 0:
        return "greedy: the likeliest token each time"
    parts = [f"temperature {sampler.temperature:g}"]
    if sampler.top_k is not None:
        parts.append(f"top-k {sampler.top_k}")
    if sampler.top_p is not None:
        parts.append(f"top-p {sampler.top_p:g}")
    return ", ".join([*parts, f"seed {seed}"])


def write_stream(
    tokenizer: Tokenizer,
    prompt: list[int],
    tokens: Iterable[torch.Tensor],
    err: bool,
) -> None:
    """Write the prompt and each token; append the tokens to the prompt."""
    text = TextStream(tokenizer)
    typer.echo(printable(text.feed(prompt)), nl=False, err=err)
    for new in tokens:
        prompt.append(int(new))
        words = printable(text.feed(prompt[-1:]))
        typer.echo(words, nl=False, err=err)
        sys.stdout.flush()
    typer.echo(printable(text.close()), err=err)


def decode(tokenizer: Tokenizer, row: list[int]) -> str:
    """Return the text of a row, whatever ids it has."""
    stream = TextStream(tokenizer)
    return stream.feed(row) + stream.close()


def printable(text: str) -> str:
    """Spell control characters out where they would steer a terminal."""
    return visible(text, kept="\n\t") if sys.stdout.isatty() else text
