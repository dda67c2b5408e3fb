"""gpt-duet generate: continue a prompt with a model, in either style."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from ..console import given_options, show_facts
from ..files import STDOUT, write_json
from ..notebooks import progress
from ..validation import (
    EXACT_DTYPES,
    choose_device,
    choose_dtype,
    require_parent,
    whole_number,
)
from . import options

# The style that draws random weights. Any style can load them.
STYLE = "mingpt_style"
PROMPT = "The assert statement"
# Values of --dtype. bfloat16 is the fastest, but its rounding may make the
# texts of the two styles differ.
PRECISIONS = (*EXACT_DTYPES, "bfloat16")
# Options that are not allowed with --checkpoint, which determines them.
BROUGHT = (
    "--tokenizer", "--file", "--weights", "--preset", "--n-layer", "--n-head",
    "--n-embd", "--block-size", "--activation",
)  # fmt: skip


def generate(
    context: typer.Context,
    style: options.Style = STYLE,
    prompts: Annotated[
        list[str] | None,
        Option(
            "--prompt",
            help=f'Text to go on from; may be repeated. Default: "{PROMPT}".',
        ),
    ] = None,
    new_tokens: Annotated[
        int, Option("--new-tokens", "--new", help="How many to append.")
    ] = 10,
    batch: Annotated[int, Option(help="Continuations of each prompt.")] = 1,
    temperature: Annotated[
        float | None,
        Option(
            help="0 is greedy. Default: 0, or 1 with --top-k or --top-p.",
        ),
    ] = None,
    top_k: Annotated[
        int | None, Option(help="Draw from the K likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        Option(help="Draw from the likeliest tokens up to probability P."),
    ] = None,
    stream: Annotated[
        bool, Option("--stream", help="Print each token as soon as it comes.")
    ] = False,
    show_ids: Annotated[
        bool, Option("--ids", help="Also print the token ids.")
    ] = False,
    tokenizer_name: options.TokenizerName = options.TOKENIZER,
    file: Annotated[
        Path | None,
        Option(
            help="Text whose characters are the tokens of --tokenizer char. "
            "Default: Python's own documentation."
        ),
    ] = None,
    checkpoint_folder: Annotated[
        Path | None,
        Option(
            "--checkpoint",
            help="The folder of a gpt-duet train run: use its model and its "
            "tokenizer, and its style unless --style is given.",
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
        str, Option("--dtype", help="float32, float64 or bfloat16.")
    ] = "float32",
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    json_file: options.Json = None,
) -> None:
    """Append new tokens to a prompt, or to several at once.

    The text goes to stdout, the facts about the model to stderr. With the
    same weights, both styles write the same text.
    """
    whole_number("seed", seed)
    require_parent(json_file)
    import torch

    from .. import generation
    from ..comparison.text import visible
    from ..protocol import LanguageModel, cache_reader, load_style
    from ..training.run_folder import load_trained
    from . import choices

    if temperature is None:
        temperature = 0.0 if top_k is None and top_p is None else 1.0
    sampler = generation.Sampler(temperature, top_k, top_p)
    prompts = prompts or [PROMPT]
    for prompt in prompts:
        choices.require_text("--prompt", prompt)
    whole_number("--new-tokens", new_tokens, at_most=generation.MAX_NEW_TOKENS)
    whole_number("--batch", batch, at_least=1)
    prompts = [prompt for prompt in prompts for _ in range(batch)]
    if stream and len(prompts) > 1:
        raise ValueError(
            f"--stream writes one continuation, got {len(prompts)}"
        )
    dtype = choose_dtype(dtype_name, PRECISIONS)
    device = choose_device(device_name)

    if checkpoint_folder is not None:
        given = given_options(context)
        for option in BROUGHT:
            if option in given:
                raise ValueError(
                    f"--checkpoint determines this: leave out {option}"
                )
        model, tokenizer, run = load_trained(
            checkpoint_folder, style if "--style" in given else None
        )
        if "--style" not in given:
            style = run.facts.style
        tokenizer_name = run.facts.tokenizer
        origin = f"{checkpoint_folder}, after {run.step} of "
        origin += f"{run.recipe.steps} steps"
    else:
        text = ""
        if tokenizer_name == "char":
            text, _ = choices.choose_text(None, file)
        tokenizer, tokenizer_name = choices.choose_tokenizer(
            tokenizer_name, text, weights
        )
        model_options = choices.ModelOptions(
            preset, n_layer, n_head, n_embd, block_size, activation
        )
        checkpoint = choices.choose_weights(
            weights, model_options, tokenizer, tokenizer_name,
            style=load_style(STYLE), seed=seed,
        )  # fmt: skip
        known, n_vocab = checkpoint.config.vocab_size, tokenizer.n_vocab
        if known > n_vocab:
            note = f"the preset's {known:,} tokens cut to {n_vocab:,}"
            checkpoint = checkpoint.cut(n_vocab, note)
        model = load_style(style).from_gpt2(
            checkpoint.to(device, dtype), checkpoint.config
        )
        origin = "; ".join(checkpoint.notes)
    model = model.to(device, dtype)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"style {style!r} does not build a language model")
    if device.type == "cpu" and cache_reader(model) is not None:
        generation.optimize_for_decoding(model)
    config = model.config
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    tokens = generation.stream_tokens(
        model,
        rows,
        new_tokens,
        **asdict(sampler),
        generator=torch.Generator(device).manual_seed(seed),
    )

    console = Console(stderr=True, highlight=False)
    lengths = [len(row) for row in rows]
    drawn = ", ".join(
        f"{name.replace('_', '-')} {value:g}"
        for name, value in {**asdict(sampler), "seed": seed}.items()
        if value is not None
    )
    facts = {
        "model": f"{style}: {choices.describe(config)}; {dtype_name} on "
        f"{device}",
        "weights": origin,
        "tokenizer": f"{tokenizer_name}, {tokenizer.n_vocab:,} tokens",
        "prompts": f"{len(rows)}, of at most {max(lengths)} tokens",
        "sampling": drawn if temperature else "greedy",
    }
    if max(lengths) > config.block_size:
        facts["prompts"] += f"; the model sees the last {config.block_size}"
    show_facts(console, facts)

    def write(text: str) -> None:
        # escape control characters, on which a terminal would act
        if sys.stdout.isatty():
            text = visible(text, kept="\n\t")
        typer.echo(text, nl=False, err=json_file == STDOUT)

    growing = generation.TextStream(tokenizer)
    if stream:
        write(growing.feed(rows[0]))
    with progress(new_tokens, wanted=not stream) as line:
        line.set_description_str("new tokens")
        for new in tokens:
            for row, token in zip(rows, new.tolist(), strict=True):
                row.append(token)
            line.update()
            if stream:
                write(growing.feed(rows[0][-1:]))
    if stream:
        write(growing.close() + "\n")
    texts = [generation.text_of(tokenizer, row) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not stream:
            write(text + "\n")
        if show_ids:
            write(" ".join(map(str, row)) + "\n")
    if json_file is not None:
        content = {
            "style": style,
            "weights": origin,
            "config": asdict(config),
            "tokenizer": tokenizer_name,
            "seed": seed,
            **asdict(sampler),
            "prompts": prompts,
            "tokens": rows,
            "texts": texts,
        }
        write_json(json_file, content)
