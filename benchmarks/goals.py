"""The project's goals: what is measured for them, and whether they are met."""

import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from shared.config import GPTConfig
from shared.protocol import load_style

from .competitors import OWN, STYLES
from .forward import (
    MATMUL,
    Plan,
    Tell,
    measure_forward,
    quiet,
    with_seconds,
)
from .generate import measure_generate
from .growth import Growth, growth
from .peers import PEERS
from .results import Results, Row, Run
from .shapes import GOALS, choose_shape
from .timing import CPU, interleave, stopwatch, time_first

OURS = STYLES[-1]
TIMES = (64, 128, 256, 512, 1024)


def measure_goals(
    rounds: int = 10,
    device: torch.device = CPU,
    tell: Tell = quiet,
) -> list[Run]:
    """Measure all that the goals are about; some 20 minutes on 2 cores.

    Args:
        rounds: of each measurement; those of long runs have fewer.
        device: the GPU's row is measured where it is one, all else on the
            CPU.
        tell: called with a few words on what is going on.
    """
    runs: list[Run] = []
    for name in GOALS:
        plan = Plan(choose_shape(name), rounds=rounds, own=True)
        say = partial(_tell, tell, name)
        runs += _attempt(replace(plan, operations=True), say)
        runs += _attempt(replace(plan, compile=True, peers=()), say)
    grown = Plan(choose_shape("S3", times=TIMES), rounds=rounds, peers=())
    runs += _attempt(grown, partial(_tell, tell, "growth"))
    runs.append(measure_construction(max(1, rounds // 3), tell))
    runs.append(measure_imports(rounds, tell))
    runs.append(
        measure_generate(
            choose_shape("gpt2", batches=(1,)),
            dtypes=(torch.float32, torch.bfloat16),
            rounds=rounds,
            styles=(OURS,),
            tell=partial(_tell, tell, "generate"),
        )
    )
    runs += measure_gpu(device, rounds, tell)
    return runs


def measure_construction(
    rounds: int = 3, tell: Tell = quiet, preset: str = "gpt2"
) -> Run:
    """Measure how long building a fresh model takes, on the CPU."""
    config = GPTConfig.preset(preset)
    builds = {name: load_style(name).build_model for name in STYLES}
    rows, runs = {}, {}
    for name, build in builds.items():
        tell(f"building {name}")
        run = partial(build, config)
        rows[name] = Row(name, [], first_seconds=time_first(run, CPU))
        runs[name] = stopwatch(run, CPU)
    return Run(
        "construction",
        {
            "shape": preset,
            "threads": torch.get_num_threads(),
            "rounds": rounds,
        },
        _filled(rows, runs, rounds),
        reference=OURS,
    )


def measure_imports(rounds: int = 10, tell: Tell = quiet) -> Run:
    """Measure what importing a style adds once torch is imported.

    Each time in a new interpreter, after its files were read once.
    """

    def fresh(name: str) -> Callable[[], float]:
        code = (
            "import time, torch; start = time.perf_counter(); "
            f"import {name}; print(time.perf_counter() - start)"
        )

        def run() -> float:
            tell(f"importing {name}")
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=True,
            )
            return float(done.stdout)

        return run

    runs = {name: fresh(name) for name in STYLES}
    rows = {
        name: Row(name, [], first_seconds=run(), note="beyond import torch")
        for name, run in runs.items()
    }
    return Run("import", {"rounds": rounds}, _filled(rows, runs, rounds), OURS)


def measure_gpu(
    device: torch.device, rounds: int = 10, tell: Tell = quiet
) -> list[Run]:
    """Measure GPT-2 124M in bfloat16 on an accelerator, if there is one."""
    shape = choose_shape("gpt2", (16,), (1024,))
    if device.type == "cpu":
        setting = shape.facts(16, 1024, torch.bfloat16, device)
        told = "there is no accelerator, or none was asked for"
        setting = {**setting, "device": "an accelerator"}
        return [Run("forward", setting, not_run=told)]
    plan = Plan(
        shape,
        torch.bfloat16,
        device,
        rounds,
        peers=("transformers", "transformers-eager"),
        compile=True,
    )
    return _attempt(plan, partial(_tell, tell, "GPU"))


def _attempt(plan: Plan, tell: Tell) -> list[Run]:
    """Measure a forward pass; what cannot be run is told, not the end."""
    try:
        return measure_forward(plan, tell)
    except ValueError as error:
        shape, device = plan.shape, plan.device
        setting = shape.facts(
            shape.batches[0], shape.times[0], plan.dtype, device
        )
        setting["compile"] = plan.compile
        return [Run("forward", setting, not_run=str(error))]


def _tell(tell: Tell, what: str, text: str) -> None:
    tell(f"{what}: {text}")


def _filled(
    rows: dict[str, Row], runs: dict[str, Callable[[], float]], rounds: int
) -> list[Row]:
    return with_seconds(rows, interleave(runs, rounds))


@dataclass(frozen=True)
class Goal:
    """A goal, and what was measured for it.

    Attributes:
        what: is measured.
        goal: in words.
        measured: in words; "not run" where it was not.
        reached: None where it was not run.
    """

    what: str
    goal: str
    measured: str
    reached: bool | None


def judge(results: Results) -> list[Goal]:
    """Return the table of goals from what was measured.

    Args:
        results: of `measure_goals`; what is missing was "not run".
    """
    runs = results.runs
    goals = [_against_fastest(_bars(runs, name), name) for name in GOALS]
    goals.append(_against_transformers(runs))
    goals += [
        _part_of_matmul(_bars(runs, name), name, least)
        for name, least in (("S1", 0.80), ("S2", 0.75))
    ]
    goals += [
        _compiled(runs, shape, name)
        for shape in GOALS
        for name in (*STYLES, STYLES[0] + OWN)
    ]
    grown = {g.name: g for g in growth(runs)}
    goals += [_growth(grown, name) for name in STYLES]
    goals += [_quick(runs, "construction", name, 3.0) for name in STYLES]
    goals += [_quick(runs, "import", name, 0.3) for name in STYLES]
    goals += _decoding(runs)
    goals += _gpu(runs)
    return goals


def _bars(runs: list[Run], shape: str) -> Run | None:
    """The eager run of a goal's shape, with peers."""
    for run in runs:
        s = run.setting
        if run.what == "forward" and s.get("shape") == shape and run.rows:
            if s.get("device") != "cpu" or s.get("dtype") != "float32":
                continue
            if any(row.name in PEERS for row in run.rows):
                return run
    return None


def _ratio(run: Run | None, ours: str, theirs: str) -> float | None:
    """Median over the rounds of their time over ours."""
    if run is None:
        return None
    a, b = run.row(ours), run.row(theirs)
    return a.timing.ratio(b.timing)[1] if a and b else None


def _missing(what: str, goal: str) -> Goal:
    return Goal(what, goal, "not run", None)


def _against_fastest(run: Run | None, shape: str) -> Goal:
    what, goal = f"{OURS}, fastest peer, {shape}", ">= 1.00"
    if run is None or run.row(OURS) is None:
        return _missing(what, goal)
    ratios = {
        row.name: _ratio(run, OURS, row.name) or math.inf
        for row in run.models
        if row.name in PEERS
    }
    fastest = min(ratios, key=ratios.__getitem__)
    found = ratios[fastest]
    return Goal(what, goal, f"{found:.2f} ({fastest})", found >= 1)


def _against_transformers(runs: list[Run]) -> Goal:
    what, goal = f"{OURS}, transformers sdpa, mean", ">= 1.05"
    found = [_ratio(_bars(runs, n), OURS, "transformers") for n in GOALS]
    known = [ratio for ratio in found if ratio is not None]
    if len(known) < len(GOALS):
        return _missing(what, goal)
    mean = statistics.geometric_mean(known)
    each = ", ".join(f"{ratio:.2f}" for ratio in known)
    return Goal(what, goal, f"{mean:.2f} ({each})", mean >= 1.05)


def _part_of_matmul(run: Run | None, shape: str, least: float | None) -> Goal:
    what = f"{OURS}, part of the matmul rate, {shape}"
    goal = "none set" if least is None else f">= {least:.0%}"
    row = run.row(OURS) if run is not None else None
    limit = run.row(MATMUL) if run is not None else None
    if row is None or limit is None or not row.rate or not limit.rate:
        return _missing(what, goal)
    part = row.rate / limit.rate
    reached = None if least is None else part >= least
    return Goal(what, goal, f"{part:.0%}", reached)


def _compiled(runs: list[Run], shape: str, name: str) -> Goal:
    what, goal = f"{name} compiled, its eager self, {shape}", ">= 0.97"
    for run in runs:
        s = run.setting
        if s.get("shape") == shape and s.get("device") == "cpu":
            found = _ratio(run, f"{name} compiled", name)
            if found is not None:
                return Goal(what, goal, f"{found:.2f}", found >= 0.97)
    return _missing(what, goal)


def _growth(grown: dict[str, Growth], name: str) -> Goal:
    what, goal = f"{name}, growth with the text", "<= formula"
    if name not in grown:
        return _missing(what, goal)
    g = grown[name]
    told = f"x {g.measured:.1f}, formula x {g.expected:.1f}"
    return Goal(what, goal, told, g.measured <= g.expected)


def _quick(runs: list[Run], what: str, name: str, limit: float) -> Goal:
    told, goal = f"{what} of {name}", f"< {limit:g} s"
    for run in runs:
        row = run.row(name)
        if run.what == what and row is not None:
            median = row.timing.median
            return Goal(told, goal, f"{median:.2f} s", median < limit)
    return _missing(told, goal)


def _decoding(runs: list[Run]) -> list[Goal]:
    run = next((run for run in runs if run.what == "generate"), None)
    pairs = [
        ("decoding, transformers' generate", OURS, "transformers", 1.2),
        (
            "a token at 900, one at 100",
            f"{OURS} @900",
            f"{OURS} @100",
            1 / 1.5,
        ),
        ("decoding, bfloat16 and float32", f"{OURS} bfloat16", OURS, 1.6),
    ]
    goals = []
    for what, ours, theirs, least in pairs:
        found, goal = _ratio(run, ours, theirs), f">= {least:.2f}"
        goals.append(
            _missing(what, goal)
            if found is None
            else Goal(what, goal, f"{found:.2f}", found >= least)
        )
    return goals


def _gpu(runs: list[Run]) -> list[Goal]:
    """Rows of the run on an accelerator, missing where there was none."""
    run = next(
        (r for r in runs if r.rows and r.setting.get("dtype") == "bfloat16"
         and r.setting.get("device") != "cpu" and r.what == "forward"), None
    )  # fmt: skip
    goals = [_part_of_matmul(run, "GPU", None)]
    for kind, least in (("", 1.0), (" compiled", 1.1)):
        what, goal = f"GPU, transformers{kind}", f">= {least:.2f}"
        found = _ratio(run, OURS + kind, f"transformers{kind}")
        goals.append(
            _missing(what, goal)
            if found is None
            else Goal(what, goal, f"{found:.2f}", found >= least)
        )
    return goals
