"""What is measured: sizes of models, batches and texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.config import GPTConfig, preset_fields, preset_names

from .results import Value

# The shapes of this project's goals: a preset or sizes, batch and time.
GOALS: dict[str, tuple[dict[str, Any], int, int]] = {
    "S1": (
        {"vocab_size": 65, "block_size": 256}
        | {"n_layer": 6, "n_head": 6, "n_embd": 384},
        8,
        256,
    ),
    "S2": (preset_fields("gpt2"), 1, 256),
    "S3": (
        {"vocab_size": 50257, "block_size": 1024}
        | {"n_layer": 6, "n_head": 8, "n_embd": 512},
        1,
        1024,
    ),
}


@dataclass(frozen=True)
class Shape:
    """A model's sizes, and what it is given.

    Attributes:
        name: the preset's.
        config: the sizes; without dropout, which no time shall depend on.
        batches: numbers of rows.
        times: numbers of tokens in a row.
    """

    name: str
    config: GPTConfig
    batches: tuple[int, ...]
    times: tuple[int, ...]

    def facts(
        self, batch: int, time: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Value]:
        """Return what identifies one measurement, for its setting."""
        return {
            "shape": self.name,
            "vocabulary": self.config.vocab_size,
            "layers": self.config.n_layer,
            "heads": self.config.n_head,
            "width": self.config.n_embd,
            "batch": batch,
            "time": time,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "threads": torch.get_num_threads(),
        }


def preset_sizes(preset: str) -> dict[str, Any]:
    """Return the fields of GPTConfig that a preset fixes.

    Raises:
        ValueError: for an unknown name.
    """
    if preset in GOALS:
        return GOALS[preset][0]
    if preset not in preset_names():
        known = ", ".join([*GOALS, *preset_names()])
        raise ValueError(f"unknown preset {preset!r}; known: {known}")
    return preset_fields(preset)


def choose_shape(
    preset: str,
    batches: Sequence[int] = (),
    times: Sequence[int] = (),
    sizes: Mapping[str, int | None] | None = None,
) -> Shape:
    """Return the shape of that name, some of its sizes set otherwise.

    Args:
        preset: S1, S2, S3, or one of GPTConfig's.
        batches: empty: the goal's own, else 8.
        times: empty: the goal's own, else 128 or the longest there is.
        sizes: fields of GPTConfig; None leaves one as it is. The vocabulary
            of a preset that leaves it open is GPT-2's, the block as long as
            the longest time.

    Raises:
        ValueError: for an unknown name, what GPTConfig refuses, or a time
            above the block size.
    """
    given = {k: v for k, v in (sizes or {}).items() if v is not None}
    fields = {"vocab_size": 50257} | preset_sizes(preset) | given
    _, batch, time = GOALS.get(preset, ({}, 8, 128))
    block = fields.get("block_size")
    times = tuple(times) or (min(time, block or time),)
    fields.setdefault("block_size", max(times))
    config = GPTConfig(**fields, dropout=0.0)
    if max(times) > config.block_size:
        raise ValueError(
            f"time {max(times)} is longer than the {config.block_size} "
            f"positions (block_size) of {preset}"
        )
    return Shape(preset, config, tuple(batches) or (batch,), times)
