"""gpt-duet compare: both styles from one set of weights over a text."""

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text as RichText

from ..comparison.page import render_page
from ..comparison.page.bench import read_bench
from ..comparison.styles import compare_weights, random_weights
from ..comparison.terminal import show_comparison, show_tokens
from ..files import write_atomically
from ..protocol import load_style
from ..tokenization.texts import text_stamp
from ..tokenization.tokenizers import DEFAULT, load_tokenizer
from ..validation import (
    choose_device,
    choose_dtype,
    require_parent,
    require_seed,
)
from . import options


def compare(
    styles: Annotated[
        list[str] | None,
        typer.Argument(
            help="Packages of two styles. Default: annotated mingpt_style.",
            show_default=False,
        ),
    ] = None,
    text: options.Text = None,
    file: options.File = None,
    tokenizer_name: options.TokenizerName = DEFAULT,
    weights: options.Weights = None,
    preset: options.Preset = None,
    n_layer: options.NLayer = None,
    n_head: options.NHead = None,
    n_embd: options.NEmbd = None,
    block_size: options.BlockSize = None,
    activation: options.Activation = None,
    dtype_name: options.Dtype = "float32",
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    json_file: options.Json = None,
    html_file: options.Html = None,
    bench_file: options.Bench = None,
) -> None:
    """Run both styles from one set of weights, and say how far apart they are.

    Ends with status 0 if they are one function, 1 if they are two.
    """
    names = tuple(styles or ("annotated", "mingpt_style"))
    if len(names) != 2:
        raise ValueError(f"compare takes two styles, got {len(names)}")
    for name in names:
        load_style(name)
    dtype = choose_dtype(dtype_name)
    require_seed(seed)
    if bench_file is not None and html_file is None:
        raise ValueError("--bench is drawn in a page: give --html, too")
    for path in (json_file, html_file):
        require_parent(path)
    options.require_different(
        {"json": json_file, "html": html_file}, file=file, bench=bench_file
    )
    bench = None if bench_file is None else read_bench(bench_file)
    content, source = options.choose_text(text, file)
    tokenizer = load_tokenizer(tokenizer_name, content)
    sizes = {"n_layer": n_layer, "n_embd": n_embd, "block_size": block_size}
    checkpoint = None
    if weights is None:
        config = options.choose_config(
            preset, tokenizer, activation, n_head=n_head, **sizes
        )
    else:
        checkpoint = options.choose_checkpoint(
            weights,
            tokenizer,
            tokenizer_name,
            n_head=n_head,
            activation=activation,
            preset=preset,
            **sizes,
        )
        config = checkpoint.config
    device = choose_device(device_name)
    ids = tokenizer.encode(content)
    shown = ids[: config.block_size]

    console = Console(highlight=False)
    console.print(
        RichText.assemble(
            ("text  ", "bold cyan"),
            f"{source}: {len(content):,} characters, sha256 "
            f"{text_stamp(content)}; {len(ids):,} tokens ({tokenizer_name})",
        )
    )
    if len(shown) < len(ids):
        console.print(
            f"      cut to its first {len(shown)} tokens, the block size"
        )
    show_tokens(console, shown, tokenizer)

    tokens = torch.tensor([shown], device=device)
    if checkpoint is None:
        drawn, told = random_weights(names[1], config, seed)
        state = {k: v.to(device, dtype) for k, v in drawn.items()}
    else:
        state = checkpoint.to(device, dtype)
        told = "; ".join((str(weights), *checkpoint.notes))
    comparison = compare_weights(names, config, state, tokens, weights=told)
    console.print(
        RichText.assemble(
            ("model ", "bold cyan"),
            f"{config.n_layer} layers, {config.n_head} heads, "
            f"{config.n_embd} wide, vocabulary {config.vocab_size:,}; "
            f"{dtype_name} on {device}",
        )
    )
    console.print(RichText(f"      weights: {comparison.weights}"))
    console.print()
    show_comparison(console, comparison, tokenizer)
    facts = {
        "source": source,
        "characters": len(content),
        "sha256": text_stamp(content),
        "tokenizer": tokenizer_name,
        "tokens": shown,
        "tokens_in_text": len(ids),
    }
    if json_file is not None:
        options.write_json(json_file, {"text": facts} | comparison.to_dict())
    if html_file is not None:
        page = render_page(comparison, state, tokens, tokenizer, facts, bench)
        write_atomically(html_file, page)
        console.print(RichText(f"page: {html_file}"))
    if not comparison.one_function:
        raise typer.Exit(1)
