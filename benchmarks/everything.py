"""Run all measurements, checks and tests: gpt-duet bench --all."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gpt_duet.benchmark_results import Row, Run
from gpt_duet.config import GPTConfig
from gpt_duet.invariants import check_model
from gpt_duet.invariants.report import BAD
from gpt_duet.processes import run_alone
from gpt_duet.protocol import load_style

from . import STYLES
from .machine import DTYPES, keep_freed_memory
from .measure import Stopped
from .plan import PRESETS, Tell, make_plan
from .run import run_plan

# seconds of all parts: 8 minutes, less the time to start and to print
SECONDS = 450.0
LEAST = 10.0  # a part starts only if at least this many seconds remain
# most seconds of a part, or a quarter of the remaining seconds if that is more
SHARE = 60.0
ROUNDS_END = 15.0  # seconds at each size after which no new round starts
CHECKS_END = 30.0
CHECKED = GPTConfig(65, 64, n_layer=2, n_head=2, n_embd=32)
TESTS = Path(__file__).parents[1] / "tests"
Part = Callable[[Tell], list[Run]]


def measure_all(
    device: torch.device, tell: Tell, keep: Callable[[list[Run]], None]
) -> list[Run]:
    """Measure, check and test, within SECONDS.

    Each part runs in its own process. It has a minute, or a quarter of the
    remaining time if that is more. A part that takes longer is stopped, and
    what it has measured is kept. After each part, `keep` gets the runs so far.
    The last run has the seconds of each part, and lists the parts that were
    stopped, failed, or not run. Ctrl-C raises Stopped.
    """
    end = time.monotonic() + SECONDS
    todo = parts(device)
    waiting = dict.fromkeys(todo, "not run")
    runs: list[Run] = []
    rows: list[Row] = []

    def so_far() -> list[Run]:
        notes = [f"{name}: {why}" for name, why in waiting.items()]
        return [*runs, Run("parts", {}, rows, notes=notes)]

    for name, part in todo.items():
        start = time.monotonic()
        left = max(end - start, 0.0)
        if left < LEAST:
            waiting[name] = f"not run: no time left ({left:.0f} s)"
            continue
        tell(name)
        del waiting[name]
        share = max(left / 4, min(left, SHARE))
        found, stopped, note = [], False, ""
        try:
            work = partial(_attempt, part)
            found, stopped = run_alone(work, tell, name, __name__, share)
        except (KeyboardInterrupt, TimeoutError):
            stopped = True
        except ValueError as error:
            note = f"ended with {' '.join(str(error).split())[:300]}"
        taken = time.monotonic() - start
        if stopped:
            note = "stopped" + ": nothing was measured" * (not found)
        runs += found
        rows.append(Row(name, [taken], note=note))
        keep(so_far())
        if stopped and taken < share:
            raise Stopped(so_far())  # a part was stopped by Ctrl-C
    return so_far()


def parts(device: torch.device) -> dict[str, Part]:
    """Return the parts by name, the most useful one first.

    Only the styles are compiled, because compiling takes long.
    """
    found: dict[str, Part] = {}
    compiled: dict[str, Part] = {}
    here = partial(make_plan, device=device, budget=ROUNDS_END)
    for name in DTYPES:
        plan = partial(here, dtypes=(getattr(torch, name),))
        for preset in PRESETS:
            one, both = plan(preset), f"{preset} {name}"
            found[f"forward {both}"] = partial(run_plan, one)
            styles = replace(one, compile=True, peers=())
            compiled[f"compiled {both}"] = partial(run_plan, styles)
        found[f"generate {name}"] = partial(run_plan, plan(
            "gpt2", (1,), (16, 900), 32, kind="generate", rounds=3,
            peers=("transformers",),
        ))  # fmt: skip
        if name == DTYPES[0]:
            for style in STYLES:
                found[f"checks of {style}"] = partial(_check, style, device)
            found["tests"] = _test
    return found | compiled


def _attempt(part: Part, tell: Tell) -> tuple[list[Run], bool]:
    """Return a part's runs, and whether the part was stopped."""
    keep_freed_memory()
    try:
        return part(tell), False
    except KeyboardInterrupt as error:
        return getattr(error, "runs", []), True
    # text, because another process may fail to unpickle the exception
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _check(style: str, device: torch.device, tell: Tell) -> list[Run]:
    build = partial(load_style(style).build_model, CHECKED)
    found = check_model(build, device=str(device), budget=CHECKS_END)
    setting = {"style": style, "dtype": "float32", "device": str(device)}
    runs = [Run("checks", setting, [
        Row(
            r.name, [max(r.seconds, 1e-6)],
            note=f"{r.status}: {r.message}", failed=r.status in BAD,
        )
        for r in found.results
    ])]  # fmt: skip
    if found.interrupted:
        raise Stopped(runs)
    return runs


def _test(tell: Tell) -> list[Run]:
    marked = [
        f for f in TESTS.rglob("test_*.py") if "mark.gpu" in f.read_text()
    ]
    if not marked:
        raise ValueError("the tests are only in a checkout")
    start = time.monotonic()
    words = ["-m", "pytest", "-q", "-m", "gpu", *map(str, marked)]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, cwd=TESTS.parent,
    )  # fmt: skip
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    failed = bool(done.returncode)
    note = ": ".join(["failed" if failed else "passed", *said])
    row = Row(
        "pytest -m gpu", [time.monotonic() - start], note=note, failed=failed
    )
    return [Run("tests", {}, [row])]
