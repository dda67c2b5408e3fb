"""All that a machine is asked in one go: gpt-duet bench --all."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt_duet.comparison.benchmark_results import Row, Run
from gpt_duet.config import GPTConfig
from gpt_duet.invariants import check_model
from gpt_duet.protocol import load_style

from . import STYLES
from .machine import DTYPES, dtype_on
from .measure import Stopped, Tell, measure
from .plan import PRESETS, Plan, dtype_name, make_plan

SECONDS = 480
ROUNDS_END = 15.0  # seconds of one size, after which no round starts
CHECKS_END = 30.0
CHECKED = GPTConfig(65, 64, n_layer=2, n_head=2, n_embd=32)
TESTS = Path(__file__).parents[1] / "tests"
# Measures something in the seconds that are left.
Part = Callable[[float, Tell], list[Run]]


def measure_all(
    device: torch.device, tell: Tell, seconds: float = SECONDS
) -> list[Run]:
    """Measure, check and test, as far as the time allows.

    A part begins where as much time is left as the longest part of its kind
    took. The last run's notes name parts that were left out, or failed.
    Ctrl-C raises Stopped with the runs of whole parts.
    """
    end, longest = time.monotonic() + seconds, {"compiled": 60.0}
    runs: list[Run] = []
    notes = []
    for name, part in parts(device):
        kind, start = name.partition(" ")[0], time.monotonic()
        if end - start < longest.get(kind, 0):
            notes.append(f"{name} was left out: no time")
            continue
        tell(name)
        try:
            runs += part(end - start, tell)
        except KeyboardInterrupt as error:
            raise Stopped(runs + getattr(error, "runs", [])) from None
        except Exception as error:  # the other parts are still to be had
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            notes.append(f"{name} ended with {reason[:300]}")
        taken = time.monotonic() - start
        longest[kind] = max(longest.get(kind, 0), taken)
    if not runs:
        raise ValueError(f"nothing was measured: {'; '.join(notes)}")
    runs[-1].notes += notes
    return runs


def parts(device: torch.device) -> Iterator[tuple[str, Part]]:
    """Give each part and its name, what is most worth knowing first.

    Only the styles are compiled, as that takes a while for each.
    """
    dtypes = []
    for name in DTYPES:
        with suppress(ValueError):
            dtypes.append(dtype_on(device, name))
    here: dict[str, Any] = {"device": device, "budget": ROUNDS_END}
    passes = [
        (f"{preset} {dtype_name(d)}", make_plan(preset, dtypes=(d,), **here))
        for d in dtypes
        for preset in PRESETS
    ]
    for name, plan in passes:
        yield f"forward {name}", partial(_measure, plan)
    yield "generate", partial(_measure, make_plan(
        "gpt2", (1,), (16, 900), 32, kind="generate", rounds=3,
        dtypes=dtypes, peers=("transformers",), **here,
    ))  # fmt: skip
    for style in STYLES:
        yield f"checks of {style}", partial(_check, style, device)
    yield "tests", _test
    for name, plan in passes:
        plan = replace(plan, compile=True, peers=())
        yield f"compiled {name}", partial(_measure, plan)


def _measure(plan: Plan, left: float, tell: Tell) -> list[Run]:
    return measure(replace(plan, budget=min(plan.budget, left)), tell)


def _check(
    style: str, device: torch.device, left: float, tell: Tell
) -> list[Run]:
    build = partial(load_style(style).build_model, CHECKED)
    budget = min(CHECKS_END, left)
    found = check_model(build, device=str(device), budget=budget).results
    setting = {"style": style, "dtype": "float32", "device": str(device)}
    return [Run("checks", setting, [
        Row(r.name, [max(r.seconds, 1e-6)], note=f"{r.status}: {r.message}")
        for r in found
    ])]  # fmt: skip


def _test(left: float, tell: Tell) -> list[Run]:
    marked = [
        f for f in TESTS.glob("test_*.py") if "mark.gpu" in f.read_text()
    ]
    if not marked:
        raise ValueError("the tests are in a checkout alone")
    start = time.monotonic()
    words = ["-m", "pytest", "-q", "-m", "gpu", *map(str, marked)]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=left, cwd=TESTS.parent,
    )  # fmt: skip
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    note = ": ".join(["failed" if done.returncode else "passed", *said])
    row = Row("pytest -m gpu", [time.monotonic() - start], note=note)
    return [Run("tests", {}, [row])]
