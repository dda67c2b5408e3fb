"""How quickly new tokens come, one after another."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.config import GPTConfig
from shared.decoding import store_by_columns
from shared.generation import generate
from shared.protocol import CachedLanguageModel

from .competitors import STYLES, build_styles
from .forward import COPY, Tell, Tokens, quiet, with_seconds
from .limits import (
    COPIED,
    big_copy,
    big_matvec,
    decoding_bytes,
    parameter_count,
)
from .peers import transformers_gpt2
from .results import Row, Run
from .shapes import Shape
from .timing import CPU, interleave, stopwatch, time_first

MATVEC = "matrix x vector"
PLACES = (100, 900)  # early and late in GPT-2's block


def measure_generate(
    shape: Shape,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: torch.device = CPU,
    prompt: int = 16,
    new: int = 128,
    rounds: int = 3,
    styles: Sequence[str] = STYLES,
    transformers: bool = True,
    tell: Tell = quiet,
) -> Run:
    """Measure greedy decoding, and one token early and late in a text.

    A style with a cache reads each token once, one without reads the whole
    text for each new token. Weights of float32 are stored by columns, as
    `gpt-duet generate` stores them.

    Args:
        shape: sizes and the number of rows, its first.
        dtypes: of the weights; the first one is the reference's.
        device: where.
        prompt: number of tokens to begin with.
        new: number of tokens to append.
        rounds: how often everything runs.
        styles: packages; the last is the reference.
        transformers: let transformers' generate run, too, if installed.
        tell: called with a few words on what is going on.

    Raises:
        ValueError: for styles that differ, and a text that does not fit
            into the block.
    """
    config, batch = shape.config, shape.batches[0]
    if prompt + new > config.block_size:
        raise ValueError(
            f"prompt {prompt} and {new} new tokens are longer than the "
            f"{config.block_size} positions (block_size) of {shape.name}"
        )
    tokens = Tokens(config.vocab_size, batch, prompt, device)
    trial = Tokens(config.vocab_size, 1, prompt, device).now
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], float]] = {}
    notes: list[str] = []

    def add(name: str, run: Any, setup: Any = None, **facts: Any) -> None:
        tell(f"trying {name}")
        if setup is not None:
            setup()
        first = time_first(run, device)
        rows[name] = Row(name, [], first_seconds=first, **facts)
        runs[name] = stopwatch(run, device, setup)

    with torch.inference_mode():
        for dtype in dtypes:
            built, _ = build_styles(styles, config, trial, dtype)
            for style in built:
                name = _named(style.name, dtype, dtypes)
                model = style.model
                store_by_columns(model)
                cached = isinstance(model, CachedLanguageModel)
                add(
                    name,
                    lambda model=model: generate(model, tokens.now, new),
                    tokens=batch * new,
                    parameters=style.parameters,
                    moved=_moved(config, batch, prompt, new, dtype)
                    if cached
                    else None,
                    note="with a cache" if cached else "without a cache",
                )
                places = [p for p in PLACES if p + 2 <= config.block_size]
                for place in places if cached else ():
                    one = OneToken(model, batch, place, device)
                    add(
                        f"{name} @{place}",
                        one.read,
                        one.prepare,
                        tokens=batch,
                        moved=decoding_bytes(
                            config, batch, place, dtype.itemsize
                        ),
                    )
        if transformers:
            try:
                theirs: Any = transformers_gpt2(config)
            except ModuleNotFoundError as error:
                notes.append(
                    f"transformers was not run: there is no module "
                    f"{error.name!r}"
                )
            else:
                theirs = theirs.to(device, dtypes[0]).eval()
                add(
                    "transformers",
                    partial(_their_generate, theirs, tokens, new),
                    tokens=batch * new,
                    parameters=parameter_count(theirs),
                    moved=_moved(config, batch, prompt, new, dtypes[0]),
                    note="generate, with its cache",
                )
        runs[COPY] = stopwatch(big_copy(device), device)
        rows[COPY] = Row(COPY, [], limit=True, moved=2 * COPIED)
        runs[MATVEC] = stopwatch(big_matvec(dtypes[0], device), device)
        rows[MATVEC] = Row(MATVEC, [], limit=True, moved=COPIED)

        def before(number: int) -> None:
            tell(f"round {number + 1} of {rounds}")
            tokens.draw(number)

        timings = interleave(runs, rounds, before=before)
    if any("@" in name for name in rows):
        notes.append("@100: one token, after 100 that are in the cache")
    setting = shape.facts(batch, prompt, dtypes[0], device)
    setting["prompt"] = setting.pop("time")
    return Run(
        "generate",
        setting | {"new": new, "rounds": rounds},
        with_seconds(rows, timings),
        reference=styles[-1],
        notes=notes,
    )


class OneToken:
    """Reads one token after so many that are in the cache already.

    Args:
        model: one with a cache.
        batch: rows.
        place: number of tokens before.
        device: where the model is.
    """

    def __init__(
        self,
        model: CachedLanguageModel,
        batch: int,
        place: int,
        device: torch.device,
    ):
        self._model, self._batch = model, batch
        before = Tokens(model.vocab_size, batch, place + 1, device).now
        self._before, self._token = before[:, :-1], before[:, -1:]
        self._cache: Any = None

    def prepare(self) -> None:
        """Fill the cache anew."""
        self._cache = self._model.init_cache(self._batch)
        self._model.decode(self._before, self._cache)

    def read(self) -> Tensor:
        """Read the token."""
        return self._model.decode(self._token, self._cache)


def _their_generate(model: Any, tokens: Tokens, new: int) -> Tensor:
    found = model.generate(
        tokens.now,
        attention_mask=torch.ones_like(tokens.now),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    if found.size(1) != tokens.now.size(1) + new:
        raise ValueError(
            f"transformers gave {found.size(1) - tokens.now.size(1)} tokens, "
            f"{new} were asked for"
        )
    return found


def _named(name: str, dtype: torch.dtype, all_: Sequence[torch.dtype]) -> str:
    if dtype == all_[0]:
        return name
    return f"{name} {str(dtype).removeprefix('torch.')}"


def _moved(
    config: GPTConfig, batch: int, prompt: int, new: int, dtype: torch.dtype
) -> int:
    """Least bytes of all new tokens; the prompt is read with the first."""
    return sum(
        decoding_bytes(config, batch, prompt + done, dtype.itemsize)
        for done in range(new)
    )
