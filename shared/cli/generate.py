"""gpt-duet generate: what a model writes after a prompt, in either style."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import nn

from ..checkpoint import Checkpoint
from ..comparison.text import visible
from ..console import progress, show_facts
from ..files import write_json
from ..generation import (
    MAX_NEW_TOKENS,
    Sampler,
    TextStream,
    optimize_for_decoding,
    stream_tokens,
)
from ..protocol import CachedLanguageModel, LanguageModel, load_style
from ..tokenization.texts import text_stamp
from ..tokenization.tokenizers import DEFAULT, Tokenizer, load_tokenizer
from ..training import load_trained
from ..validation import (
    EXACT_DTYPES,
    choose_device,
    choose_dtype,
    require_parent,
    require_seed,
    whole_number,
)
from . import options
from .choices import (
    ModelOptions,
    choose_text,
    choose_weights,
    describe,
    require_text,
    tokenizer_beside,
)

# Draws the random weights, whatever style they are then loaded into.
STYLE = "mingpt_style"
PROMPT = "The assert statement"
# The shortest is fastest, and rounds so much that styles may part ways.
PRECISIONS = (*EXACT_DTYPES, "bfloat16")


@dataclass(frozen=True)
class Chosen:
    """A model with its tokenizer, and where both are from, in words."""

    model: nn.Module
    style: str
    weights: str
    tokenizer: Tokenizer
    tokenizer_name: str
    characters: str = ""


def generate(
    context: typer.Context,
    style: options.Style = STYLE,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            help=f'Text to go on from; may be repeated. Default: "{PROMPT}".',
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", help="How many to append.")
    ] = 10,
    batch: Annotated[
        int, typer.Option("--batch", help="Continuations of each prompt.")
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="0 is greedy. Default: 0, or 1 with --top-k or --top-p.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Draw from the K likeliest tokens."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="Draw from the fewest tokens that reach probability P.",
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the text as it comes.")
    ] = False,
    show_ids: Annotated[
        bool, typer.Option("--ids", help="Also print the token ids.")
    ] = False,
    tokenizer_name: options.TokenizerName = DEFAULT,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help="Text whose characters are the tokens of --tokenizer char. "
            "Default: Python's own documentation.",
        ),
    ] = None,
    checkpoint_folder: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            help="The folder of a run of gpt-duet train: its model, in its "
            "style unless --style is given, and its tokenizer.",
        ),
    ] = None,
    weights: options.Weights = None,
    preset: options.Preset = None,
    n_layer: options.NLayer = None,
    n_head: options.NHead = None,
    n_embd: options.NEmbd = None,
    block_size: options.BlockSize = None,
    activation: options.Activation = None,
    dtype_name: Annotated[
        str, typer.Option("--dtype", help="float32, float64 or bfloat16.")
    ] = "float32",
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    json_file: options.Json = None,
) -> None:
    """Append new tokens to a prompt, or to several at once.

    The text goes to stdout, the facts about the model to stderr. From one
    set of weights both styles write the same text.
    """
    if temperature is None:
        temperature = 0.0 if top_k is None and top_p is None else 1.0
    sampler = Sampler(temperature, top_k, top_p)
    prompts = prompts or [PROMPT]
    for prompt in prompts:
        require_text("--prompt", prompt)
    whole_number("--new-tokens", new_tokens, at_most=MAX_NEW_TOKENS)
    count = len(prompts) * whole_number("--batch", batch, at_least=1)
    if stream and count > 1:
        raise ValueError(f"--stream writes one row, and there are {count}")
    dtype = choose_dtype(dtype_name, PRECISIONS)
    require_seed(seed)
    require_parent(json_file)
    device = choose_device(device_name)

    if checkpoint_folder is not None:
        given = options.given(context)
        chosen = _choose_trained(checkpoint_folder, given)
    else:
        characters = ""
        if file is None and (own := tokenizer_beside(weights, tokenizer_name)):
            tokenizer, tokenizer_name = own
        else:
            tokenizer, characters = _choose_tokenizer(tokenizer_name, file)
        model_options = ModelOptions(
            preset, n_layer, n_head, n_embd, block_size, activation
        )
        checkpoint = choose_weights(
            weights, model_options, tokenizer, tokenizer_name,
            style=STYLE, seed=seed,
        )  # fmt: skip
        checkpoint = _for_writing(checkpoint, tokenizer.n_vocab)
        chosen = Chosen(
            load_style(style).from_gpt2(
                checkpoint.to(device, dtype), checkpoint.config
            ),
            style,
            "; ".join(checkpoint.notes),
            tokenizer,
            tokenizer_name,
            characters,
        )
    model = chosen.model.to(device, dtype)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"style {chosen.style!r} builds no language model")
    if device.type == "cpu" and isinstance(model, CachedLanguageModel):
        optimize_for_decoding(model)
    tokenizer, config = chosen.tokenizer, model.config
    prompts = [prompt for prompt in prompts for _ in range(batch)]
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    tokens = stream_tokens(
        model,
        rows,
        new_tokens,
        **asdict(sampler),
        generator=torch.Generator(device).manual_seed(seed),
    )

    console = Console(stderr=True, highlight=False)
    facts = {
        "model": f"{chosen.style}: {describe(config)}; {dtype_name} on "
        f"{device}",
        "weights": chosen.weights,
        "tokenizer": f"{chosen.tokenizer_name}, {tokenizer.n_vocab:,} "
        f"tokens{chosen.characters}",
        "prompts": _describe_lengths(rows, config.block_size),
        "sampling": _describe_sampler(sampler, seed),
    }
    show_facts(console, facts)
    if stream:
        _write_stream(tokenizer, rows[0], tokens)
    else:
        with progress(console, new_tokens) as show:
            for done, new in enumerate(tokens, start=1):
                for row, token in zip(rows, new.tolist(), strict=True):
                    row.append(token)
                show(done, "new tokens")
    texts = [_decode(tokenizer, row) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not stream:
            typer.echo(_printable(text))
        if show_ids:
            typer.echo(" ".join(map(str, row)))
    if json_file is not None:
        content = {
            "style": chosen.style,
            "weights": chosen.weights,
            "config": asdict(config),
            "tokenizer": chosen.tokenizer_name,
            "seed": seed,
            **asdict(sampler),
            "prompts": prompts,
            "tokens": rows,
            "texts": texts,
        }
        write_json(json_file, content)


def _choose_trained(folder: Path, given: Mapping[str, object]) -> Chosen:
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


def _choose_tokenizer(name: str, file: Path | None) -> tuple[Tokenizer, str]:
    """Return the tokenizer, and in words where its characters are from."""
    if name != "char":
        if file is not None:
            raise ValueError(f"--file is for --tokenizer char, not for {name}")
        return load_tokenizer(name), ""
    text, source = choose_text(None, file)
    origin = f" from {source}, sha256 {text_stamp(text)}"
    return load_tokenizer(name, text), origin


def _for_writing(checkpoint: Checkpoint, n_vocab: int) -> Checkpoint:
    """Leave out the tokens for which the tokenizer has no text."""
    rows = checkpoint.config.vocab_size
    if rows == n_vocab:
        return checkpoint
    return checkpoint.cut(
        n_vocab, f"the preset's {rows:,} tokens cut to {n_vocab:,}"
    )


def _describe_lengths(rows: list[list[int]], block_size: int) -> str:
    lengths = sorted({len(row) for row in rows})
    words = " and ".join(map(str, lengths))
    if len(lengths) > 3:
        words = f"{lengths[0]} to {lengths[-1]}"
    seen = ""
    if lengths[-1] > block_size:
        seen = f"; the model sees the last {block_size}"
    return f"{len(rows)}, of {words} tokens{seen}"


def _describe_sampler(sampler: Sampler, seed: int) -> str:
    if sampler.temperature == 0:
        return "greedy: the likeliest token each time"
    parts = [f"temperature {sampler.temperature:g}"]
    if sampler.top_k is not None:
        parts.append(f"top-k {sampler.top_k}")
    if sampler.top_p is not None:
        parts.append(f"top-p {sampler.top_p:g}")
    return ", ".join([*parts, f"seed {seed}"])


def _write_stream(
    tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[torch.Tensor]
) -> None:
    """Write the prompt and each token; append the tokens to the prompt."""
    text = TextStream(tokenizer)
    typer.echo(_printable(text.feed(prompt)), nl=False)
    for new in tokens:
        prompt.append(int(new))
        typer.echo(_printable(text.feed(prompt[-1:])), nl=False)
        sys.stdout.flush()
    typer.echo(_printable(text.close()))


def _decode(tokenizer: Tokenizer, row: list[int]) -> str:
    stream = TextStream(tokenizer)
    return stream.feed(row) + stream.close()


def _printable(text: str) -> str:
    """Spell control characters out where they would steer a terminal."""
    return visible(text, kept="\n\t") if sys.stdout.isatty() else text
