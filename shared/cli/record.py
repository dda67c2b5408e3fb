"""gpt-duet record: write a model's values to a file, for a port's tests."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ..importing import theirs_shown
from ..validation import DTYPES, choose_dtype, require_parent
from . import options
from .diffing import choose_tokens


@theirs_shown()
def record(
    target: Annotated[
        str,
        Argument(
            help="A model: a style, package.module:factory, "
            "path/to/file.py:factory, or an expression after the colon.",
        ),
    ],
    out: Annotated[
        Path, Option("--out", help="The .safetensors file to write.")
    ],
    text: Annotated[str | None, Option(help="The text to run.")] = None,
    tokens: Annotated[
        str | None,
        Option(
            help='The ids to run, like "1,2,3". Default: 16 ids drawn from a '
            "seed."
        ),
    ] = None,
    tokenizer_name: options.TokenizerName = options.TOKENIZER,
    vocab_size: Annotated[
        int | None,
        Option(help="Number of tokens, if the model does not declare it."),
    ] = None,
    dtype: Annotated[
        str | None,
        Option(help="Dtype to run in. Default: that of the weights."),
    ] = None,
    gradients: Annotated[
        bool,
        Option("--gradients", help="Add the gradients of the weights."),
    ] = False,
    statistics: Annotated[
        bool,
        Option(
            "--statistics",
            help="Write only mean, deviation, least, most and norm of each "
            "value.",
        ),
    ] = False,
) -> None:
    """Write each value that a model computes, with the line that computes it.

    Names are such as "0012 layer 1 block.py:43 ln_1"; the metadata has the
    file, line, operation, layer and shape. `gpt-duet diff` accepts the file
    as a model.
    """
    require_parent(out)
    from ..comparison.values import record_values
    from ..targets import load_target

    ids, _ = choose_tokens([target], text, tokens, tokenizer_name)
    model = load_target(target, vocab_size)
    count = record_values(
        model,
        ids,
        out,
        vocab_size=vocab_size,
        dtype=choose_dtype(dtype, DTYPES) if dtype else None,
        gradients=gradients,
        statistics=statistics,
    )
    typer.echo(f"{count} values: {out}")
