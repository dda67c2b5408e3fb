"""The project's goals: what is measured for them, and whether they are met."""

import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shared.config import GPTConfig
from shared.protocol import load_style

from .competitors import OWN, STYLES
from .forward import (
    Plan,
    Tell,
    matmul_row,
    measure_forward,
    quiet,
    with_seconds,
)
from .generate import measure_generate
from .growth import Growth, growth
from .peers import ONE_GELU, PEERS
from .results import Results, Row, Run, Value
from .shapes import GOALS, choose_shape
from .timing import CPU, interleave, stopwatch, time_first

OURS = STYLES[-1]
TIMES = (64, 128, 256, 512, 1024)
# without the one whose function was replaced by ours, which is quicker
AS_THEY_COME = tuple(name for name in PEERS if name != ONE_GELU)


def measure_goals(
    rounds: int = 10,
    device: torch.device = CPU,
    tell: Tell = quiet,
) -> list[Run]:
    """Measure all that the goals are about, whatever part of it fails.

    Some 20 minutes on 2 cores at 10 rounds; compiling, a good part of them,
    takes the same at fewer. A part that fails becomes a run that was not
    run, with the reason, and the others go on.

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
        runs += _forward(replace(plan, operations=True), say)
        runs += _forward(replace(plan, compile=True, peers=()), say)
    grown = Plan(choose_shape("S3", times=TIMES), rounds=rounds, peers=())
    runs += _forward(grown, partial(_tell, tell, "growth"))
    few = max(1, rounds // 3)
    runs += _attempt(
        "construction",
        {"rounds": few},
        lambda: [measure_construction(few, tell)],
    )
    runs += _attempt(
        "import", {"rounds": rounds}, lambda: [measure_imports(rounds, tell)]
    )
    decode = partial(
        measure_generate,
        choose_shape("gpt2", batches=(1,)),
        dtypes=(torch.float32, torch.bfloat16),
        rounds=rounds,
        styles=(OURS,),
        tell=partial(_tell, tell, "generate"),
    )
    runs += _attempt("generate", {"rounds": rounds}, lambda: [decode()])
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
    return _forward(plan, partial(_tell, tell, "GPU"))


def _forward(plan: Plan, tell: Tell) -> list[Run]:
    """Measure a forward pass; what cannot be run is told, not the end."""
    shape = plan.shape
    setting = shape.facts(
        shape.batches[0], shape.times[0], plan.dtype, plan.device
    )
    return _attempt(
        "forward",
        setting | {"compile": plan.compile},
        partial(measure_forward, plan, tell),
    )


def _attempt(
    what: str, setting: dict[str, Value], measure: Callable[[], list[Run]]
) -> list[Run]:
    """Measure something; what cannot be run is told, not the end."""
    try:
        return measure()
    except Exception as error:  # the other parts took minutes
        return [Run(what, setting, not_run=_reason(error))]


def _reason(error: Exception) -> str:
    """Say in one line why something failed."""
    told = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        # what Python says last is the error itself
        last = (error.stderr or "").strip().splitlines()[-1:]
        told = f"status {error.returncode}: {''.join(last)}"
    elif not isinstance(error, ValueError):
        told = f"{type(error).__name__}: {told}"
    return " ".join(told.split())[:300]


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
    goals = [
        _against_fastest(_bars(runs, name), f"{whom}, {name}", peers)
        for whom, peers in (
            ("fastest peer as it comes", AS_THEY_COME),
            ("fastest peer", tuple(PEERS)),
        )
        for name in GOALS
    ]
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
    goals += [_own_norm(_bars(runs, name), name) for name in GOALS]
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


def school_cost(run: Run | None, style: str) -> float | None:
    """Return what a school's own parts add to a style's pass, as a part.

    Of the pass with them, by the median over the rounds: 0.25 where they
    make a pass of 3 seconds one of 4. None where only one of the two was
    measured.
    """
    ratio = _ratio(run, style, style + OWN)
    return None if ratio is None else 1 - 1 / ratio


def _missing(what: str, goal: str) -> Goal:
    return Goal(what, goal, "not run", None)


def _least(
    what: str, least: float, found: float | None, told: str = ""
) -> Goal:
    """A ratio that shall be so much; three digits, or a miss looks level."""
    goal = f">= {least:.2f}"
    if found is None:
        return _missing(what, goal)
    return Goal(what, goal, f"{found:.3f}{told}", found >= least)


def _against_fastest(run: Run | None, whom: str, peers: Sequence[str]) -> Goal:
    """Judge against peers: where some are absent, only a miss is sure."""
    what, goal = f"{OURS}, {whom}", ">= 1.00"
    if run is None or run.row(OURS) is None:
        return _missing(what, goal)
    ratios = {
        row.name: _ratio(run, OURS, row.name) or math.inf
        for row in run.models
        if row.name in peers
    }
    if not ratios:
        return _missing(what, goal)
    fastest = min(ratios, key=ratios.__getitem__)
    absent = [name for name in peers if name not in ratios]
    if not absent:
        return _least(what, 1.0, ratios[fastest], f" ({fastest})")
    told = f" ({fastest}; without {', '.join(absent)})"
    judged = _least(what, 1.0, ratios[fastest], told)
    return replace(judged, reached=None) if judged.reached else judged


def _against_transformers(runs: list[Run]) -> Goal:
    what = f"{OURS}, transformers sdpa, mean"
    found = [_ratio(_bars(runs, n), OURS, "transformers") for n in GOALS]
    known = [ratio for ratio in found if ratio is not None]
    if len(known) < len(GOALS):
        return _least(what, 1.05, None)
    each = ", ".join(f"{ratio:.3f}" for ratio in known)
    return _least(what, 1.05, statistics.geometric_mean(known), f" ({each})")


def _part_of_matmul(run: Run | None, shape: str, least: float | None) -> Goal:
    what = f"{OURS}, part of the matmul rate, {shape}"
    goal = "none set" if least is None else f">= {least:.0%}"
    row = run.row(OURS) if run is not None else None
    limit = matmul_row(run) if run is not None else None
    if row is None or limit is None or not row.rate or not limit.rate:
        return _missing(what, goal)
    part = row.rate / limit.rate
    reached = None if least is None else part >= least
    return Goal(what, goal, f"{part:.1%}", reached)


def _compiled(runs: list[Run], shape: str, name: str) -> Goal:
    what, found = f"{name} compiled, its eager self, {shape}", None
    for run in runs:
        s = run.setting
        if s.get("shape") == shape and s.get("device") == "cpu":
            found = _ratio(run, f"{name} compiled", name)
            if found is not None:
                break
    return _least(what, 0.97, found)


def _growth(grown: dict[str, Growth], name: str) -> Goal:
    what, goal = f"{name}, growth with the text", "<= formula"
    if name not in grown:
        return _missing(what, goal)
    g = grown[name]
    told = (
        f"operations^{g.exponent:.3f} (x {g.measured:.1f}, "
        f"formula x {g.expected:.1f})"
    )
    return Goal(what, goal, told, g.exponent <= 1)


def _own_norm(run: Run | None, shape: str) -> Goal:
    """What LayerNorm written out adds to torch's: told, no goal."""
    what = f"{STYLES[0]}, its school's LayerNorm, {shape}"
    cost = school_cost(run, STYLES[0])
    if cost is None:
        return _missing(what, "none set")
    return Goal(what, "none set", f"{cost:.1%} of the pass", None)


def _quick(runs: list[Run], what: str, name: str, limit: float) -> Goal:
    told, goal = f"{what} of {name}", f"< {limit:g} s"
    for run in runs:
        row = run.row(name)
        if run.what == what and row is not None:
            median = row.timing.median
            return Goal(told, goal, f"{median:.3f} s", median < limit)
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
    return [
        _least(what, least, _ratio(run, ours, theirs))
        for what, ours, theirs, least in pairs
    ]


def _gpu(runs: list[Run]) -> list[Goal]:
    """Rows of the run on an accelerator, missing where there was none."""
    run = next(
        (r for r in runs if r.rows and r.setting.get("dtype") == "bfloat16"
         and r.setting.get("device") != "cpu" and r.what == "forward"), None
    )  # fmt: skip
    goals = [_part_of_matmul(run, "GPU", None)]
    for kind, least in (("", 1.0), (" compiled", 1.1)):
        for name in STYLES:
            found = _ratio(run, name + kind, f"transformers{kind}")
            what = f"{name}{kind} on the GPU, transformers{kind}"
            goals.append(_least(what, least, found))
    return goals
