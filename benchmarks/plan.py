"""Plan a measurement: models, sizes, tokens, rounds."""

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
# Presets by name: fields of a GPTConfig, rows in a batch, tokens in a row. S1
# is a small model of characters, S2 is GPT-2 small, S3 has long texts and a
# large vocabulary.
CHARACTERS = {"vocab_size": 65, "block_size": 256}
LONG = {"vocab_size": 50257, "block_size": 1024}
PRESETS: dict[str, tuple[dict[str, Any], int, int]] = {
    "S1": (CHARACTERS | {"n_layer": 6, "n_head": 6, "n_embd": 384}, 8, 256),
    "S2": (preset_fields("gpt2"), 1, 256),
    "S3": (LONG | {"n_layer": 6, "n_head": 8, "n_embd": 512}, 1, 1024),
}


Tell = Callable[[str], None]  # a function that shows the current step


@dataclass(frozen=True)
class Plan:
    """The models to measure, their sizes, device and rounds.

    To add an option of a measurement, add a field here. If results with
    different values of the option must not be compared, add the option to
    `setting` as well.
    """

    preset: str  # name of the sizes; "" if the user gave the sizes
    config: GPTConfig  # without dropout, so that times do not depend on it
    batches: Sequence[int]  # numbers of rows to measure
    times: Sequence[int]  # tokens in a row; for generate, tokens of the prompt
    kind: Kind = "forward"
    # dtypes of the timed weights (whether the styles agree is tested in
    # float32); only generate takes several
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    device: torch.device = CPU
    rounds: int = 10  # number of rounds
    budget: float = math.inf  # seconds after which no round starts
    styles: Sequence[str] = STYLES  # style packages; the last is the reference
    peers: Sequence[str] = PEERS  # names in PEERS, or MODULE:FACTORY
    installed: bool = True  # whether to leave out PEERS that are not installed
    cache: str | None = None  # MODULE:FUNCTION that makes the peers' caches
    own: bool = False  # whether to add styles with their own LayerNorm
    log_probs: bool = False  # whether all models end in log-softmax
    compile: bool = False  # whether to time compiled models as well
    new: int = 0  # tokens that generate appends
    threads: int | None = None  # CPU threads; None: by the work of each size
    limits: bool = True  # whether to measure the machine's best speed
    cold: bool = False  # whether to empty caches before each run or token
    # rounds are run until each ratio's error is below this; 0 means all rounds
    until: float = 0.0
    # settings that are unknown until the peers are built
    open: frozenset[str] = frozenset()
    shaped: bool = True  # whether any model is built with the config's sizes

    @property
    def reference(self) -> str:
        """Return the name of the row that other rows are compared with."""
        return [*(self.styles or self.peers)][-1]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return the sizes to measure: each number of rows at each length."""
        return [*product(self.batches, self.times)]

    def setting(
        self, batch: int, time: int, threads: int | None = None
    ) -> dict[str, Value]:
        """Return the settings that are stored with a run, and identify it.

        Three things may be left out: sizes that are still open; the config's
        sizes, if no row was built from it; and the number of threads, if it is
        not known.
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
            "rounds": 0 if self.until else self.rounds,
        }
        if self.cold:  # left out if False, as in older files
            facts["cold"] = True
        sizes = {"shape", "layers", "heads", "width"}
        left_out = self.open | (set() if self.shaped else sizes)
        return {
            name: value
            for name, value in facts.items()
            if name not in left_out and (value or value is False)
        }


class Tokens:
    """Random ids (batch, time), and the next ids as targets."""

    def __init__(self, plan: Plan, batch: int, time: int):
        self._size = (plan.config.vocab_size, (batch, time + 1))
        self._device = plan.device
        self.draw(-1)

    def draw(self, number: int) -> None:
        """Draw the ids of a round, which depend only on its number."""
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
    """Return a plan with the sizes of a preset, unless sizes are given.

    A preset of GPTConfig has batch 8 and time 128, or its block size if that
    is less. If a preset sets no vocabulary, it gets GPT-2's. If it sets no
    block size, it gets the length of the longest text. `sizes` are fields of
    GPTConfig; None keeps the preset's value.
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
