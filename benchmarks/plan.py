"""The plan of a measurement: models, sizes, tokens, rounds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gpt_duet.benchmark_results import Value
from gpt_duet.config import GPTConfig, preset_fields, preset_names
from gpt_duet.validation import dtype_name

from . import PEERS, STYLES, Kind

CPU = torch.device("cpu")
# A GPTConfig's fields, a batch and a time: a small model on characters,
# GPT-2 small, and a long text with a large vocabulary.
CHARACTERS = {"vocab_size": 65, "block_size": 256}
LONG = {"vocab_size": 50257, "block_size": 1024}
PRESETS: dict[str, tuple[dict[str, Any], int, int]] = {
    "S1": (CHARACTERS | {"n_layer": 6, "n_head": 6, "n_embd": 384}, 8, 256),
    "S2": (preset_fields("gpt2"), 1, 256),
    "S3": (LONG | {"n_layer": 6, "n_head": 8, "n_embd": 512}, 1, 1024),
}


Tell = Callable[[str], None]  # says what is going on


@dataclass(frozen=True)
class Plan:
    """The models to measure, their sizes, device and rounds."""

    preset: str  # name of the sizes; "" where others were given
    config: GPTConfig  # without dropout, which no time shall depend on
    batches: Sequence[int]  # numbers of rows
    times: Sequence[int]  # tokens in a row; of generate those of the prompt
    kind: Kind = "forward"
    # of the weights, once the styles agree; generate may have several
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    device: torch.device = CPU
    rounds: int = 10  # how often everything runs
    budget: float = math.inf  # seconds; after it no further round starts
    styles: Sequence[str] = STYLES  # packages; the last is the reference
    peers: Sequence[str] = PEERS  # or MODULE:FACTORY
    installed: bool = True  # leave out those of PEERS that are not installed
    cache: str | None = None  # the target that makes the peers' caches
    own: bool = False  # add each style with its own original parts
    log_probs: bool = False  # let all end in log-softmax
    compile: bool = False  # run everything through torch.compile as well
    new: int = 0  # tokens that generate appends
    threads: int | None = None  # of the CPU; None: by the work of each size
    limits: bool = True  # measure how fast the machine can be
    # settings that the user left to the peers, until these are built
    open: frozenset[str] = frozenset()
    shaped: bool = True  # whether it is known that a row has config's shape

    @property
    def reference(self) -> str:
        """The name of the row that the others are compared to."""
        return [*(self.styles or self.peers)][-1]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Each batch and time."""
        return [*product(self.batches, self.times)]

    def setting(
        self, batch: int, time: int, threads: int | None = None
    ) -> dict[str, Value]:
        """Return what a run is kept with, and found again by.

        Left out are sizes that the peers have yet to say, the sizes of a
        config that no row is built from, and a thread count that no option
        names.
        """
        c, decoding = self.config, self.kind == "generate"
        facts: dict[str, Value] = {
            "shape": self.preset,
            "vocabulary": c.vocab_size,
            **{"layers": c.n_layer, "heads": c.n_head, "width": c.n_embd},
            "batch": batch,
            "prompt" if decoding else "time": time,
            "new": self.new,
            "compile": self.compile,
            "log_probs": self.log_probs,
            "dtype": dtype_name(self.dtypes[0]),
            "device": str(self.device),
            "threads": threads or self.threads or 0,
            "rounds": self.rounds,
        }
        sizes = {"shape", "layers", "heads", "width"}
        left_out = self.open | (set() if self.shaped else sizes)
        return {
            name: value
            for name, value in facts.items()
            if name not in left_out and (value or value is False)
        }


class Tokens:
    """Random ids (batch, time), and as targets those one place later."""

    def __init__(self, plan: Plan, batch: int, time: int):
        self._size = (plan.config.vocab_size, (batch, time + 1))
        self._device = plan.device
        self.draw(-1)

    def draw(self, number: int) -> None:
        """Draw the ids of a round; the same number, the same ids."""
        generator = torch.Generator().manual_seed(number + 1)
        drawn = torch.randint(*self._size, generator=generator)
        drawn = drawn.to(self._device)
        self.ids = drawn[:, :-1].contiguous()
        self.targets = drawn[:, 1:].contiguous()


def make_plan(
    preset: str = "S1",
    batches: Sequence[int] = (),
    times: Sequence[int] = (),
    new: int = 0,
    sizes: Mapping[str, int | None] | None = None,
    **others: Any,
) -> Plan:
    """Return a plan whose sizes are those of a preset where not given.

    A preset of GPTConfig has batch 8 and time 128, or the longest there is;
    a vocabulary that it leaves open is GPT-2's, its block as long as the
    longest text. Sizes are fields of GPTConfig, None for the preset's.
    """
    if preset not in PRESETS and preset not in preset_names():
        known = ", ".join([*PRESETS, *preset_names()])
        raise ValueError(f"unknown preset {preset!r}; known: {known}")
    fixed, batch, time = PRESETS.get(preset) or (
        preset_fields(preset), 8, 128
    )  # fmt: skip
    fields: dict[str, Any] = {"vocab_size": 50257, **fixed}
    given = {k: v for k, v in (sizes or {}).items() if v is not None}
    fields |= given
    times = times or (min(time, fields.get("block_size", time)),)
    longest = max(times) + new
    config = GPTConfig(**{"block_size": longest, **fields, "dropout": 0.0})
    if longest > (block := config.block_size):
        words = f"{longest} tokens in a row are more than the {block}"
        raise ValueError(f"{words} positions (block_size) of {preset}")
    if any(fixed.get(name, size) != size for name, size in given.items()):
        preset = ""
    return Plan(preset, config, batches or (batch,), times, new=new, **others)
