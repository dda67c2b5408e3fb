"""How quickly new tokens come, one after another."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.config import GPTConfig
from shared.generation import generate, optimize_for_decoding
from shared.protocol import CachedLanguageModel

from .competitors import STYLES, build_peers, build_styles
from .forward import COPY, Tell, Tokens, quiet, with_seconds
from .limits import COPIED, big_copy, big_read, decoding_bytes
from .profiling import peak_bytes
from .results import Row, Run, Value
from .shapes import Shape
from .timing import CPU, interleave, stopwatch, time_first

READ_ONCE = "read"
PLACES = (100, 900)  # early and late in GPT-2's block
READ = 8  # tokens in a sample: one alone is quick, and noisy


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
    installed: bool = True,
    tell: Tell = quiet,
) -> Run:
    """Measure greedy decoding, and one token early and late in a text.

    A style with a cache reads each token once, one without reads the whole
    text for each new token. On the CPU a style with a cache is optimized
    for it first, as `gpt-duet generate` does.

    Args:
        shape: sizes and the number of rows, its first.
        dtypes: of the weights; the first one is the reference's.
        device: where.
        prompt: number of tokens to begin with.
        new: number of tokens to append.
        rounds: how often everything runs.
        styles: packages; the last is the reference.
        transformers: let transformers' generate run, too.
        installed: leave it out where it is not installed.
        tell: called with a few words on what is going on.

    Raises:
        ValueError: for styles that differ, a text that does not fit into
            the block, and transformers that was asked for and is not there.
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
    peers, notes = build_peers(
        ("transformers",) if transformers else (),
        config,
        dtypes[0],
        device,
        installed=installed,
    )

    def add(name: str, run: Any, setup: Any = None, **facts: Any) -> None:
        tell(f"trying {name}")
        prepare = setup or (lambda: None)
        prepare()
        first = time_first(run, device)
        prepare()
        peak = peak_bytes(run, device)
        rows[name] = Row(
            name, [], first_seconds=first, peak_bytes=peak, **facts
        )
        runs[name] = stopwatch(run, device, setup)

    with torch.inference_mode():
        for dtype in dtypes:
            built, _ = build_styles(styles, config, trial, dtype)
            for style in built:
                name = _named(style.name, dtype, dtypes)
                model = style.model
                cached = isinstance(model, CachedLanguageModel)
                if cached and device.type == "cpu":
                    optimize_for_decoding(model)
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
                for place in _places(config.block_size) if cached else ():
                    some = SomeTokens(model, batch, place, device)
                    add(
                        f"{name} @{place}",
                        some.read,
                        some.prepare,
                        tokens=batch,
                        moved=decoding_bytes(
                            config, batch, place, dtype.itemsize
                        ),
                    )
                    runs[f"{name} @{place}"] = _each(runs[f"{name} @{place}"])
        for peer in peers:
            add(
                peer.name,
                partial(_their_generate, peer.model, tokens, new),
                tokens=batch * new,
                parameters=peer.parameters,
                moved=_moved(config, batch, prompt, new, dtypes[0]),
                note="generate, with its cache",
            )
        runs[COPY] = stopwatch(big_copy(device), device)
        rows[COPY] = Row(COPY, [], limit=True, moved=2 * COPIED)
        runs[READ_ONCE] = stopwatch(big_read(device), device)
        rows[READ_ONCE] = Row(READ_ONCE, [], limit=True, moved=COPIED)

        def before(number: int) -> None:
            tell(f"round {number + 1} of {rounds}")
            tokens.draw(number)

        timings = interleave(runs, rounds, before=before)
    if any("@" in name for name in rows):
        notes.append(
            f"@100: one token, the mean of {READ}, after 100 that are in the "
            "cache"
        )
    return Run(
        "generate",
        generate_setting(shape, prompt, new, dtypes[0], device)
        | {"rounds": rounds},
        with_seconds(rows, timings),
        reference=styles[-1],
        notes=notes,
    )


def generate_setting(
    shape: Shape,
    prompt: int,
    new: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Value]:
    """Return what a run is kept with, and found again by."""
    setting = shape.facts(shape.batches[0], prompt, dtype, device)
    setting["prompt"] = setting.pop("time")
    return setting | {"new": new}


def _places(block_size: int) -> list[int]:
    """Where there is room for three readings, which a sample takes."""
    return [p for p in PLACES if p + 3 * READ <= block_size]


def _each(sample: Callable[[], float]) -> Callable[[], float]:
    """Seconds of one token, from those of so many."""
    return lambda: sample() / READ


class SomeTokens:
    """Reads READ tokens, one by one, after those that are in the cache.

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
        drawn = Tokens(model.vocab_size, batch, place + READ, device).now
        self._before, new = drawn[:, :place], drawn[:, place:]
        self._new = new.split(1, dim=1)
        self._cache: Any = None

    def prepare(self) -> None:
        """Fill the cache anew."""
        self._cache = self._model.init_cache(self._batch)
        self._model.decode(self._before, self._cache)

    def read(self) -> Tensor:
        """Read the tokens; what follows the last one is returned."""
        for token in self._new:
            found = self._model.decode(token, self._cache)
        return found


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
