"""gpt-duet generate: what a model writes after a prompt, in either style."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text as RichText
from torch import nn

from ..checkpoint import State, cut_vocabulary
from ..comparison.styles import enlarged_random_weights
from ..config import GPTConfig
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
)
from . import options

# Draws the random weights, whatever style they are then loaded into.
DRAWS = "mingpt_style"
PROMPT = "A long time ago"
# The shortest is fastest, and rounds so much that styles may part ways.
DTYPES = (*EXACT_DTYPES, "bfloat16")
PATIENCE = 1.0  # seconds without a sign of life before a progress bar comes

Item = TypeVar("Item")


@dataclass(frozen=True)
class Writer:
    """A model with its tokenizer, and where both are from, in words."""

    style: str
    model: nn.Module
    tokenizer: Tokenizer
    tokenizer_name: str
    spoken: str
    told: list[str]


def generate(
    style: Annotated[
        str | None,
        typer.Option(
            "--style",
            help='Package: "annotated", "mingpt_style" or yours. Default: '
            f"that of --checkpoint, else {DRAWS}.",
            show_default=False,
        ),
    ] = None,
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
        int, typer.Option("--batch", help="Rows for each prompt.")
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
            "--top-p", help="Draw from the fewest that reach probability P."
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the text as it comes.")
    ] = False,
    show_ids: Annotated[
        bool, typer.Option("--ids", help="Print each row's ids, too.")
    ] = False,
    tokenizer_name: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="See gpt-duet tokenizers. Default: that of --checkpoint, "
            f"else {DEFAULT}.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help='Text whose characters are the tokens of "char". '
            "Default: Python's own documentation.",
        ),
    ] = None,
    checkpoint_folder: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", help="The folder of a run of gpt-duet train."
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
        str, typer.Option("--dtype", help=f"One of {', '.join(DTYPES)}.")
    ] = "float32",
    seed: Annotated[
        int,
        typer.Option("--seed", help="Of random weights and random choices."),
    ] = 0,
    device_name: options.Device = "cpu",
    json_file: options.Json = None,
) -> None:
    """Append new tokens to a prompt, or to several at once.

    The text goes to stdout, what it was made from to stderr. Both styles
    write the same, from one set of weights.
    """
    if temperature is None:
        temperature = 0.0 if top_k is None and top_p is None else 1.0
    sampler = Sampler(temperature, top_k, top_p)
    prompts = prompts or [PROMPT]
    _require_prompts(prompts, new_tokens, batch, stream)
    dtype = choose_dtype(dtype_name, DTYPES)
    require_seed(seed)
    require_parent(json_file)
    device = choose_device(device_name)
    sizes: dict[str, Any] = {
        "preset": preset, "n_layer": n_layer, "n_head": n_head,
        "n_embd": n_embd, "block_size": block_size, "activation": activation,
    }  # fmt: skip
    if checkpoint_folder is not None:
        _require_nothing_beside(
            tokenizer=tokenizer_name, file=file, weights=weights, **sizes
        )
        writer = _recall(checkpoint_folder, style)
        writer.model.to(device, dtype)
    else:
        name = tokenizer_name or DEFAULT
        tokenizer, spoken = _choose_tokenizer(name, file)
        config, state, told = _choose_weights(
            weights, tokenizer, name, seed, **sizes
        )
        state = {key: t.to(device, dtype) for key, t in state.items()}
        style = DRAWS if style is None else style
        model = load_style(style).from_gpt2(state, config)
        writer = Writer(style, model, tokenizer, name, spoken, told)
    model, tokenizer = writer.model, writer.tokenizer
    if not isinstance(model, LanguageModel):
        raise ValueError(f"style {writer.style!r} builds no language model")
    config = model.config
    if device.type == "cpu" and isinstance(model, CachedLanguageModel):
        optimize_for_decoding(model)
    rows = [tokenizer.encode(p) for p in prompts for _ in range(batch)]
    tokens = stream_tokens(
        model,
        rows,
        new_tokens,
        **asdict(sampler),
        generator=torch.Generator(device).manual_seed(seed),
    )

    facts = Console(stderr=True)
    _show_facts(
        facts,
        {
            "model": f"{writer.style}: {config.n_layer} layers, "
            f"{config.n_head} heads, {config.n_embd} wide, block of "
            f"{config.block_size}; {dtype_name} on {device}",
            "weights": "; ".join(writer.told),
            "tokens": writer.spoken,
            "prompt": _describe_lengths(rows, config.block_size),
            "choice": _describe(sampler, seed),
        },
    )
    rows = [list(row) for row in rows]
    if stream:
        _write_stream(tokenizer, rows[0], tokens)
    else:
        for new in with_progress(tokens, new_tokens, facts):
            for row, token in zip(rows, new.tolist(), strict=True):
                row.append(token)
    texts = [_decode(tokenizer, row) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not stream:
            typer.echo(_printable(text))
        if show_ids:
            typer.echo(" ".join(map(str, row)))
    if json_file is not None:
        content = {
            "style": writer.style,
            "weights": "; ".join(writer.told),
            "config": asdict(config),
            "tokenizer": writer.tokenizer_name,
            "seed": seed,
            **asdict(sampler),
            "prompts": [p for p in prompts for _ in range(batch)],
            "tokens": rows,
            "texts": texts,
        }
        options.write_json(json_file, content)


def with_progress(
    items: Iterable[Item], total: int, console: Console
) -> Iterator[Item]:
    """Pass items on; in a terminal, show a bar once it has taken a while."""
    bar, start = None, time.monotonic()
    try:
        for done, item in enumerate(items, start=1):
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            elif (
                console.is_interactive and time.monotonic() > start + PATIENCE
            ):
                bar = Progress(console=console, transient=True)
                bar.start()
                bar.add_task("new tokens", total=total, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _require_prompts(
    prompts: list[str], new_tokens: int, batch: int, stream: bool
) -> None:
    for prompt in prompts:
        if not prompt:
            raise ValueError("--prompt is empty: give it at least a character")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"--prompt is not UTF-8: {error.reason}"
            ) from None
    if not 0 <= new_tokens <= MAX_NEW_TOKENS:
        raise ValueError(
            f"--new-tokens must be from 0 to {MAX_NEW_TOKENS:,}, got "
            f"{new_tokens}"
        )
    if batch < 1:
        raise ValueError(f"--batch must be at least 1, got {batch}")
    if stream and len(prompts) * batch > 1:
        raise ValueError(
            f"--stream writes one row, and there are {len(prompts) * batch}"
        )


def _require_nothing_beside(**options_given: object) -> None:
    for name, value in options_given.items():
        if value is not None:
            raise ValueError(
                f"--checkpoint brings its own: leave "
                f"--{name.replace('_', '-')} out"
            )


def _recall(folder: Path, style: str | None) -> Writer:
    """Return what a training run has learnt, in its style or another."""
    model, tokenizer, run = load_trained(folder, style)
    name = run.facts["tokenizer"]["name"]
    spoken = f"{name}, {tokenizer.n_vocab:,} of them"
    told = [f"{run.folder}, after {run.step} of {run.recipe.steps} steps"]
    style = run.facts["style"] if style is None else style
    return Writer(style, model, tokenizer, name, spoken, told)


def _choose_weights(
    folder: Path | None,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    seed: int,
    preset: str | None,
    **sizes: Any,
) -> tuple[GPTConfig, State, list[str]]:
    """Return a config, weights for it, and in words where they are from."""
    if folder is None:
        config = options.choose_config(preset, tokenizer, **sizes)
        return _draw(config, tokenizer, seed)
    checkpoint = options.choose_checkpoint(
        folder, tokenizer, tokenizer_name, preset=preset, **sizes
    )
    told = [str(folder), *checkpoint.notes]
    return checkpoint.config, checkpoint.state, told


def _choose_tokenizer(name: str, file: Path | None) -> tuple[Tokenizer, str]:
    """Return the tokenizer, and what it is, in words."""
    if name == "char":
        text, source = options.choose_text(None, file)
        tokenizer = load_tokenizer(name, text)
        origin = f" in {source}, sha256 {text_stamp(text)}"
    elif file is not None:
        raise ValueError(f"--file is for --tokenizer char, not for {name}")
    else:
        tokenizer, origin = load_tokenizer(name), ""
    return tokenizer, f"{name}, {tokenizer.n_vocab:,} of them{origin}"


def _draw(
    config: GPTConfig, tokenizer: Tokenizer, seed: int
) -> tuple[GPTConfig, State, list[str]]:
    """Random weights, and no rows for tokens that the tokenizer lacks."""
    state = enlarged_random_weights(load_style(DRAWS), config, seed)
    told = [f"random, seed {seed}: expect nonsense"]
    if config.vocab_size > tokenizer.n_vocab:
        told.append(
            f"of {config.vocab_size:,} tokens those that the tokenizer has"
        )
        state = cut_vocabulary(state, tokenizer.n_vocab)
        config = config.replace(vocab_size=tokenizer.n_vocab)
    return config, state, told


def _describe_lengths(rows: list[list[int]], block_size: int) -> str:
    lengths = sorted({len(row) for row in rows})
    words = " and ".join(map(str, lengths))
    if len(lengths) > 3:
        words = f"{lengths[0]} to {lengths[-1]}"
    seen = ""
    if lengths[-1] > block_size:
        seen = f"; the model sees the last {block_size}"
    return f"{len(rows)} of {words} tokens{seen}"


def _describe(sampler: Sampler, seed: int) -> str:
    if sampler.temperature == 0:
        return "the likeliest token each time"
    parts = [f"drawn at temperature {sampler.temperature:g}"]
    if sampler.top_k is not None:
        parts.append(f"top-k {sampler.top_k}")
    if sampler.top_p is not None:
        parts.append(f"top-p {sampler.top_p:g}")
    return ", ".join([*parts, f"seed {seed}"])


def _show_facts(console: Console, facts: dict[str, str]) -> None:
    for name, fact in facts.items():
        line = RichText.assemble((f"{name:9}", "bold cyan"), fact)
        console.print(line, soft_wrap=True)


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
    if not sys.stdout.isatty():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text
    )
