"""gpt-duet compare: run both styles from one set of weights on a text."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from ..comparison.page.live import Verdict

PORT = 8000  # port of the live page
# Tokens and seconds of check_causality on the live page: enough tokens to show
# a mask, few enough seconds for a reader to wait. A slow machine on which the
# check neither proves nor finds anything in that time runs it again with more.
JUDGED_TOKENS, JUDGED_SECONDS = 8, (2.0, 10.0, 60.0)


def judge_causality(model: Any) -> "Verdict":
    """Return the verdict of check_causality on a model."""
    from ..comparison.page.live import Verdict
    from ..invariants import check_model
    from ..running.tokens import spans

    for seconds in JUDGED_SECONDS:
        report = check_model(
            model,
            vocab_size=model.vocab_size,
            block_size=min(JUDGED_TOKENS, model.block_size),
            checks=["check_causality"],
            budget=seconds,
            on_progress=lambda report: None,
        )
        (result,) = report.results
        proved = result.proof is not None and result.proof["proved"]
        if proved or result.status == "failed":
            break
    headline = result.status
    if result.leak is not None:
        where = "position {position} sees token {token}".format(**result.leak)
        headline = f"{where}, by {result.leak['size']:.2g}"
    elif result.proof is not None and proved:
        lengths = spans(result.proof["lengths"])
        headline = (
            f"proved at lengths {lengths}: no position sees a later token"
        )
    return Verdict(result.status, headline, result.message)


def compare(
    styles: Annotated[
        list[str] | None,
        Argument(
            help="Two styles: packages that implement the decoder. Default: "
            "annotated mingpt_style.",
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
            help="Draw times in the page, from a file that gpt-duet bench "
            "forward --json wrote.",
        ),
    ] = None,
    serve: Annotated[
        bool,
        Option(
            "--serve",
            help="Serve the page on this machine, with a field for your own "
            "texts. Ctrl-C ends it.",
        ),
    ] = False,
    port: Annotated[
        int | None,
        Option(
            help=f"Port of --serve; 0: any free one. Default: {PORT}.",
            min=0,
            max=65_535,
        ),
    ] = None,
) -> None:
    """Run two styles from one set of weights, and show how far they differ.

    The styles compute one function if rounding explains the difference: then
    the exit status is 0, otherwise 1.
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
    if bench_file is not None and html_file is None and not serve:
        raise ValueError("--bench requires a page: give --html as well")
    for path in (json_file, html_file):
        require_parent(path)
    require_different(
        {"json": json_file, "html": html_file}, file=file, bench=bench_file
    )
    if port is not None and not serve:
        raise ValueError("--port requires the live page: give --serve as well")
    import torch

    from ..benchmark_results import read_first_run
    from ..comparison.page import Live, PageServer, render_page
    from ..comparison.styles import compare_pair, make_pair
    from ..comparison.terminal import show_comparison, show_tokens
    from ..protocol import load_style
    from ..tokenization.texts import default_passage, text_stamp
    from . import choices

    server = PageServer(PORT if port is None else port) if serve else None
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
    show_comparison(console, comparison, tokenizer, used)
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
    page = partial(
        render_page, pair, comparison, tokenizer, text_facts,
        bench, bench_file.name if bench_file else "",
    )  # fmt: skip
    if html_file is not None:
        write_atomically(html_file, page())
        console.print(RichText(f"page: {html_file}"))
    if server is not None:
        live = Live(pair, tokenizer, used, judge_causality)
        server.open(page(live), live.questions)
        console.print(
            RichText(f"live page: {server.address} (Ctrl-C ends it)")
        )
        server.run()
        console.print("stopped")
    if not comparison.one_function:
        raise typer.Exit(1)
