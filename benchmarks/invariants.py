"""How long the checks of a model take."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from shared.invariants import Report, check_model
from shared.targets import load_target

from .competitors import STYLES
from .forward import Tell, quiet, with_seconds
from .results import Row, Run, Value
from .timing import CPU, clock_for, interleave

QUICK = "check_shape"  # the warm-up


def measure_invariants(
    models: Sequence[str] = STYLES,
    *,
    vocab_size: int = 65,
    block_size: int = 64,
    rounds: int = 1,
    device: torch.device = CPU,
    tell: Tell = quiet,
) -> Run:
    """Measure check_model on small models: all of the checks.

    Each model is checked a little before, uncounted: the first run of
    anything is slower than all others.

    Args:
        models: styles, or MODULE:FACTORY, as gpt-duet check takes them.
        vocab_size: number of tokens.
        block_size: longest text that is tried.
        rounds: how often all models are checked.
        device: where.
        tell: called with a few words on what is going on.

    Raises:
        ValueError: for a model that cannot be had, or that fails a check:
            how long a failing check takes says nothing.
    """
    reports: dict[str, Report] = {}

    def checked(name: str) -> Callable[[], float]:
        check = partial(
            check_model,
            load_target(name, vocab_size, block_size),
            vocab_size=vocab_size,
            block_size=block_size,
            device=device,
        )
        clock = clock_for(device)
        check(checks=[QUICK])

        def run() -> float:
            tell(f"checking {name}")
            start = clock()
            report = check()
            if not report.ok:
                failed = ", ".join(report.failed)
                raise ValueError(f"{name} fails {failed}: not timed")
            reports[name] = report
            return clock() - start

        return run

    timings = interleave({name: checked(name) for name in models}, rounds)
    rows = {
        name: Row(
            name,
            [],
            note=f"{len(report.results)} checks",
            operations=_parts(report),
        )
        for name, report in reports.items()
    }
    setting: dict[str, Value] = {
        "vocabulary": vocab_size,
        "block": block_size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
    return Run(
        "invariants",
        setting,
        with_seconds(rows, timings),
        reference=models[-1],
    )


def _parts(report: Report, top: int = 5) -> dict[str, float]:
    """Return the checks that take longest, as parts of the whole."""
    total = sum(result.seconds for result in report.results)
    ranked = sorted(report.results, key=lambda result: -result.seconds)
    return {r.name: r.seconds / total for r in ranked[:top]}
