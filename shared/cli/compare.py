"""gpt-duet compare: both styles from one set of weights over a text."""

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text as RichText

from shared.comparison import compare_styles
from shared.comparison.styles import compare_weights
from shared.comparison.terminal import show_comparison, show_tokens
from shared.corpus import text_stamp
from shared.protocol import load_style
from shared.tokenization import DEFAULT, load_tokenizer

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
) -> None:
    """Run both styles from one set of weights, and say how far apart they are.

    Ends with status 0 if they are one function, 1 if they are two.
    """
    names = tuple(styles or ("annotated", "mingpt_style"))
    if len(names) != 2:
        raise ValueError(f"compare takes two styles, got {len(names)}")
    for name in names:
        load_style(name)
    dtype = options.choose_dtype(dtype_name)
    options.require_seed(seed)
    options.require_parent(json_file)
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
    device = options.choose_device(device_name)
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
        comparison = compare_styles(
            names, config, tokens, dtype=dtype, seed=seed
        )
    else:
        comparison = compare_weights(
            names,
            config,
            checkpoint.to(device, dtype),
            tokens,
            weights="; ".join((str(weights), *checkpoint.told)),
        )
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
    if json_file is not None:
        text_facts = {
            "source": source,
            "characters": len(content),
            "sha256": text_stamp(content),
            "tokenizer": tokenizer_name,
            "tokens": shown,
            "tokens_in_text": len(ids),
        }
        options.write_json(
            json_file, {"text": text_facts} | comparison.to_dict()
        )
    if not comparison.one_function:
        raise typer.Exit(1)
