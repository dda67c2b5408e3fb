"""How long a forward pass takes: both styles, their peers, the limit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from .competitors import (
    STYLES,
    Competitor,
    answer,
    build_peers,
    build_styles,
    compiled,
    parameter_note,
    require_as_eager,
    require_sound,
    with_log_probs,
)
from .limits import (
    BIG_SQUARE,
    COPIED,
    SQUARE,
    big_copy,
    count_flops,
    forward_flops,
    least_bytes,
    own_products,
    square_product,
    square_size,
)
from .peers import PEERS
from .profiling import peak_bytes, time_by_operation
from .results import Row, Run, Value
from .shapes import Shape
from .timing import CPU, Timing, interleave, stopwatch, time_first

MATMUL = f"matmul {SQUARE}"  # on a CPU; see `matmul_row`
OWN_MATMULS = "own matmuls"
COPY = "copy"
MOST_TOKENS = 2**31 - 1
STYLES_RAN = "first run: the styles were run before, to compare them"

Tell = Callable[[str], None]


def quiet(_text: str) -> None:
    """Tell nobody what is going on."""


@dataclass(frozen=True)
class Plan:
    """What a forward pass is measured with.

    Attributes:
        shape: sizes, batches and times.
        dtype: of the weights, once the styles were found to agree.
        device: where.
        rounds: how often everything runs.
        styles: packages; the last is the reference.
        peers: of PEERS, or MODULE:FACTORY.
        installed: leave out peers in the box that are not installed.
        own: add each style with its school's own parts.
        log_probs: let all end in log-softmax.
        compile: run everything through torch.compile, too.
        operations: say where the time of each goes.
        budget: seconds after which no further round starts.
    """

    shape: Shape
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    rounds: int = 10
    styles: Sequence[str] = STYLES
    peers: Sequence[str] = tuple(PEERS)
    installed: bool = True
    own: bool = False
    log_probs: bool = False
    compile: bool = False
    operations: bool = False
    budget: float = math.inf

    def setting(self, batch: int, time: int) -> dict[str, Value]:
        """Return what a run is kept with, and found again by."""
        return self.shape.facts(batch, time, self.dtype, self.device) | {
            "rounds": self.rounds,
            "compile": self.compile,
            "log_probs": self.log_probs,
        }


class Tokens:
    """Random ids that are drawn anew before each round.

    Args:
        vocab_size: ids are below it.
        batch: rows.
        time: ids in a row.
        device: where they are.

    Raises:
        ValueError: for more ids than any machine could work on.
    """

    def __init__(
        self, vocab_size: int, batch: int, time: int, device: torch.device
    ):
        if batch * time > MOST_TOKENS:  # torch would end in a TypeError
            raise ValueError(
                f"{batch} rows of {time} tokens are too many: at most "
                f"{MOST_TOKENS} tokens"
            )
        self._size = (vocab_size, (batch, time))
        self._device = device
        self.draw(-1)

    def draw(self, number: int) -> None:
        """Draw the ids of a round; the same number, the same ids."""
        generator = torch.Generator().manual_seed(number + 1)
        drawn = torch.randint(*self._size, generator=generator)
        self.now: Tensor = drawn.to(self._device)


def measure_forward(plan: Plan, tell: Tell = quiet) -> list[Run]:
    """Measure a forward pass at each batch and time of a plan.

    Each row's first run is its first at that batch and time. The styles
    were run on one row before, to compare them, so that the library has
    warmed up for theirs.

    Args:
        plan: what to measure.
        tell: called with a few words on what is going on.

    Raises:
        ValueError: for styles that differ, or a peer that is refused.
    """
    config, device = plan.shape.config, plan.device
    tell("building")
    longest = Tokens(config.vocab_size, 1, max(plan.shape.times), device)
    styles, difference = build_styles(
        plan.styles, config, longest.now, plan.dtype, own=plan.own
    )
    peers, left_out = build_peers(
        plan.peers, config, plan.dtype, device, installed=plan.installed
    )
    everyone = [*styles, *peers]
    if plan.log_probs:
        everyone = list(map(with_log_probs, everyone))
    notes = [*left_out, STYLES_RAN]
    if len(plan.styles) > 1:
        agree = f"in float32 the styles agree to {difference:.1e}"
        notes.insert(0, agree)
    return [
        _measure_one(plan, everyone, batch, time, notes, tell)
        for batch, time in product(plan.shape.batches, plan.shape.times)
    ]


def _measure_one(
    plan: Plan,
    everyone: list[Competitor],
    batch: int,
    time: int,
    notes: list[str],
    tell: Tell,
) -> Run:
    config, dtype, device = plan.shape.config, plan.dtype, plan.device
    tokens = Tokens(config.vocab_size, batch, time, device)
    if plan.compile:
        torch.compiler.reset()  # one graph for each size, none kept
        everyone = [c for e in everyone for c in (e, compiled(e))]
    ours = next(
        c.parameters or 0 for c in everyone if c.name == plan.styles[-1]
    )
    matmul, square = matmul_limit(dtype, device)
    limits = {
        matmul.name: square,
        OWN_MATMULS: own_products(config, batch, time, dtype, device),
        COPY: big_copy(device),
    }
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], float]] = {}
    work = forward_flops(config, batch, time)
    moved = least_bytes(config, batch, time, dtype.itemsize)
    with torch.inference_mode():
        for number, competitor in enumerate(everyone):
            tell(f"trying {competitor.name}")
            first = time_first(partial(answer, competitor, tokens.now), device)
            told = [competitor.note]
            if competitor.compiled:
                eager = everyone[number - 1]
                require_as_eager(competitor, eager, tokens.now)
            else:
                require_sound(competitor, tokens.now, config.vocab_size)
                told.append(parameter_note(competitor, config, ours))
                told.append(_work_note(competitor, tokens.now, work))

            def run(competitor: Competitor = competitor) -> Tensor:
                return competitor.scores(tokens.now)

            runs[competitor.name] = stopwatch(run, device)
            operations = {}
            if plan.operations:
                operations = time_by_operation(run, device)
            rows[competitor.name] = Row(
                competitor.name,
                [],
                flops=work,
                moved=moved,
                tokens=batch * time,
                gives=competitor.gives,
                parameters=competitor.parameters,
                first_seconds=first,
                peak_bytes=peak_bytes(run, device),
                note="; ".join(filter(None, told)),
                operations=operations,
            )
        for name, limit in limits.items():
            runs[name] = stopwatch(limit, device)
        rows[matmul.name] = matmul
        rows[OWN_MATMULS] = Row(OWN_MATMULS, [], limit=True, flops=work)
        rows[COPY] = Row(COPY, [], limit=True, moved=2 * COPIED)

        def before(number: int) -> None:
            tell(f"time {time}: round {number + 1} of {plan.rounds}")
            tokens.draw(number)

        timings = interleave(
            runs, plan.rounds, before=before, budget=plan.budget
        )
    return Run(
        "forward",
        plan.setting(batch, time),
        with_seconds(rows, timings),
        reference=plan.styles[-1],
        notes=notes,
    )


def matmul_limit(
    dtype: torch.dtype, device: torch.device
) -> tuple[Row, Callable[[], Tensor]]:
    """Return the row of the square product, without times, and its run."""
    size = square_size(device)
    row = Row(f"matmul {size}", [], limit=True, flops=2 * size**3)
    return row, square_product(dtype, device)


def matmul_row(run: Run) -> Row | None:
    """Return a run's square product, whose size depends on the device."""
    found = (run.row(f"matmul {size}") for size in (SQUARE, BIG_SQUARE))
    return next((row for row in found if row is not None), None)


def with_seconds(rows: dict[str, Row], timings: Sequence[Timing]) -> list[Row]:
    """Return the rows with the times that were measured for them."""
    return [
        Row(**vars(rows[timing.name]) | {"seconds": timing.seconds})
        for timing in timings
    ]


def _work_note(competitor: Competitor, tokens: Tensor, work: int) -> str:
    """Say where a competitor's products are not those of the formula."""
    # rows are alike, and one is counted sooner
    counted = count_flops(lambda: competitor.scores(tokens[:1]))
    counted *= len(tokens)
    if counted == work:
        return ""
    return f"torch's counter sees {counted / work:.0%} of these operations"
