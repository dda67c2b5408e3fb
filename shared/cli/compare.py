"""gpt-duet compare: both styles from one set of weights over a text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text as RichText
from typer import Argument, Option

from ..console import show_facts
from ..files import STDOUT, write_atomically, write_json
from ..targets import PREFIX
from ..validation import (
    choose_device,
    choose_dtype,
    require_different,
    require_parent,
    whole_number,
)
from . import options


def compare(
    styles: Annotated[
        list[str] | None,
        Argument(
            help="Two styles, each a package that writes the decoder in its "
            "own way. Default: annotated mingpt_style.",
        ),
    ] = None,
    text: options.Text = None,
    file: options.File = None,
    tokenizer_name: options.TokenizerName = options.TOKENIZER,
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
    threads: options.Threads = None,
    json_file: options.Json = None,
    html_file: Annotated[
        Path | None,
        Option("--html", help="Also write a page with both styles."),
    ] = None,
    bench_file: Annotated[
        Path | None,
        Option(
            "--bench",
            help="Draw these times in the page: a file that gpt-duet bench "
            "forward --json wrote.",
        ),
    ] = None,
) -> None:
    """Run two styles from one set of weights, and show how far they differ.

    They compute one function if rounding explains the difference: then the
    exit status is 0, else 1.
    """
    names = tuple(styles or ("annotated", "mingpt_style"))
    if len(names) != 2:
        raise ValueError(f"compare takes two styles, got {len(names)}")
    if any(name.startswith(PREFIX) for name in names):
        raise ValueError(
            f"a program is not a style: gpt-duet diff {names[0]!r} "
            f"{names[1]!r} compares them"
        )
    whole_number("seed", seed)
    if bench_file is not None and html_file is None:
        raise ValueError("--bench is drawn in a page: give --html, too")
    for path in (json_file, html_file):
        require_parent(path)
    require_different(
        {"json": json_file, "html": html_file}, file=file, bench=bench_file
    )
    import torch

    from ..benchmark_results import read_first_run
    from ..comparison.page import render_page
    from ..comparison.styles import compare_pair, make_pair
    from ..comparison.terminal import show_comparison, show_tokens
    from ..protocol import load_style
    from ..tokenization.texts import default_passage, text_stamp
    from . import choices

    packages = load_style(names[0]), load_style(names[1])
    dtype = choose_dtype(dtype_name)
    bench = None if bench_file is None else read_first_run(bench_file)
    content, source = choices.choose_text(text, file, default_passage)
    tokenizer, tokenizer_name = choices.choose_tokenizer(
        tokenizer_name, content, weights
    )
    model_options = choices.ModelOptions(
        preset, n_layer, n_head, n_embd, block_size, activation
    )
    checkpoint = choices.choose_weights(
        weights, model_options, tokenizer, tokenizer_name,
        style=packages[1], seed=seed,
    )  # fmt: skip
    device = choose_device(device_name)

    config = checkpoint.config
    ids = tokenizer.encode(content)
    used = ids[: config.block_size]
    notes, stamp = "; ".join(checkpoint.notes), text_stamp(content)
    cut = f"; the first {len(used)} are used (the block size)"
    console = Console(highlight=False, stderr=json_file == STDOUT)
    facts = {
        "text": f"{source}: {len(content):,} characters, sha256 {stamp}",
        "tokens": f"{len(ids):,} ({tokenizer_name})"
        f"{cut if len(used) < len(ids) else ''}",
        "model": f"{choices.describe(config)}, vocabulary "
        f"{config.vocab_size:,}; {dtype_name} on {device}",
        "weights": notes,
    }
    show_facts(console, facts)
    show_tokens(console, used, tokenizer)
    console.print()
    tokens = torch.tensor([used], device=device)
    pair = make_pair(packages, config, checkpoint.to(device, dtype), tokens)
    comparison = compare_pair(pair, weights=notes, threads=threads)
    show_comparison(console, comparison, tokenizer)
    text_facts = {
        "source": source,
        "characters": len(content),
        "sha256": stamp,
        "tokenizer": tokenizer_name,
        "tokens": used,
        "tokens_in_text": len(ids),
    }
    if json_file is not None:
        write_json(json_file, {"text": text_facts} | comparison.to_dict())
    if html_file is not None:
        page = render_page(
            pair, comparison, tokenizer, text_facts,
            bench, bench_file.name if bench_file else "",
        )  # fmt: skip
        write_atomically(html_file, page)
        console.print(RichText(f"page: {html_file}"))
    if not comparison.one_function:
        raise typer.Exit(1)
