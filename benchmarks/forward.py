"""How long a forward pass of each style takes, from the same weights."""

import random
import statistics
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Timer

from shared.cli import options
from shared.comparison.models import largest_difference
from shared.comparison.styles import rounding_bound, shaken_weights
from shared.config import GPTConfig
from shared.protocol import load_style

STYLES = ("annotated", "mingpt_style")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure the speed of both styles.",
)


@app.callback()
def benchmarks() -> None:
    """Measure the speed of both styles."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one forward pass, over all rounds.

    Attributes:
        name: what ran.
        seconds: one number a round, in the order of the rounds.
    """

    name: str
    seconds: list[float]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of the seconds."""
        if len(self.seconds) == 1:
            return (self.seconds[0],) * 3
        first, median, third = statistics.quantiles(
            self.seconds, n=4, method="inclusive"
        )
        return first, median, third

    def ratio(self, other: "Timing") -> float:
        """Median over the rounds of the other's time over this one's."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


def interleave(
    runs: dict[str, Any], rounds: int, seed: int = 0
) -> list[Timing]:
    """Time each run once a round, in a shuffled order.

    A slow moment of the machine then hits all of them alike, and a ratio
    taken within each round is fair.

    Args:
        runs: for each name a callable that returns the seconds it took.
        rounds: how many.
        seed: of the order.
    """
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            seconds[name].append(runs[name]())
    return [Timing(name, times) for name, times in seconds.items()]


@app.command()
def forward(
    preset: options.Preset = "gpt-mini",
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 8,
    time: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 128,
    rounds: Annotated[int, typer.Option(help="Times each style runs.")] = 20,
    device_name: options.Device = "cpu",
    dtype_name: options.Dtype = "float32",
    json_file: options.Json = None,
) -> None:
    """Time log_probs of both styles, after checking that they agree."""
    for name, count in (("batch", batch), ("time", time), ("rounds", rounds)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    options.require_parent(json_file)
    dtype = options.choose_dtype(dtype_name)
    device = options.choose_device(device_name)
    config = GPTConfig.preset(
        preset or "gpt-mini", vocab_size=50257, block_size=time
    )
    tokens = torch.randint(config.vocab_size, (batch, time), device=device)

    state = shaken_weights(load_style(STYLES[-1]), config, seed=0)
    state = {k: v.to(device, dtype) for k, v in state.items()}
    models = {
        name: load_style(name).from_gpt2(state, config).eval()
        for name in STYLES
    }
    with torch.inference_mode():
        outputs = [model.log_probs(tokens) for model in models.values()]
        difference = largest_difference(*outputs)
        bound = rounding_bound(models[STYLES[-1]], tokens)
        if not difference <= bound:
            raise ValueError(
                f"the styles differ by {difference:.2g} (bound {bound:.2g}); "
                "what computes something else is not timed"
            )
        timings = interleave(
            {name: _timer(model, tokens) for name, model in models.items()},
            rounds,
        )
    console = Console(highlight=False)
    console.print(
        f"{preset}, batch {batch}, time {time}, {dtype_name} on {device}, "
        f"{torch.get_num_threads()} threads, {rounds} rounds; "
        f"outputs agree to {difference:.1e}"
    )
    console.print(_table(timings, batch * time))
    if json_file is not None:
        content = {
            "preset": preset,
            "batch": batch,
            "time": time,
            "dtype": dtype_name,
            "device": str(device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": {t.name: t.seconds for t in timings},
        }
        options.write_json(json_file, content)


def _timer(model: Any, tokens: torch.Tensor) -> Any:
    timer = Timer(
        "model.log_probs(tokens)",
        globals={"model": model, "tokens": tokens},
        num_threads=torch.get_num_threads(),
    )
    timer.timeit(2)  # warm-up; Timer waits for the device by itself
    return lambda: timer.timeit(1).median


def _table(timings: list[Timing], tokens: int) -> Table:
    table = Table(box=None, header_style="bold cyan", padding=(0, 2, 0, 0))
    table.add_column("forward")
    for column in ("median", "quartiles", "tokens/s", "ratio"):
        table.add_column(column, justify="right")
    for timing in timings:
        first, median, third = timing.quartiles
        table.add_row(
            timing.name,
            f"{median * 1e3:.2f} ms",
            f"{first * 1e3:.2f} to {third * 1e3:.2f}",
            f"{tokens / median:,.0f}",
            f"{timing.ratio(timings[0]):.2f}",
        )
    return table
