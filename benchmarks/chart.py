"""Results as a picture: bars for each setting, lines for a sweep of times."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt_duet.comparison.benchmark_results import Results, Run
from gpt_duet.files import replace_file

from .tables import seconds

# one colour for each style, one for all peers
COLORS = {"annotated": "#b45f06", "mingpt_style": "#2166ac"}
PEER = "#9a9a9a"
SWEEP = 3  # times that make a line; fewer are bars
TITLE = ("shape", "layers", "width", "batch", "time", "prompt", "new")


def require_picture(path: Path | None) -> None:
    """Refuse a name that ends neither in .svg nor in .png."""
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ValueError(f"a plot ends in .svg or .png, got {path.name}")


def draw(results: Results, path: Path) -> None:
    """Draw every run as bars, and sweeps of time as lines."""
    # slow to import, and only a picture needs it
    import matplotlib
    from matplotlib.figure import Figure

    panels = _panels(results.runs)
    heights = [
        1.1 + 0.3 * len(runs[0].models) if len(runs) < SWEEP else 4
        for runs in panels
    ]
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "path"}):
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        axes = figure.subplots(
            len(panels), squeeze=False, height_ratios=heights
        )[:, 0]
        for runs, ax in zip(panels, axes, strict=True):
            ax.spines[["top", "right"]].set_visible(False)
            drawing = _draw_bars if len(runs) < SWEEP else _draw_lines
            drawing(runs, ax)
        facts = ", ".join(f"{k} {v}" for k, v in results.machine.items())
        facts = textwrap.fill(facts, 130)
        figure.supxlabel(facts, fontsize=7, color="#555555")
        kind = path.suffix.removeprefix(".")
        with replace_file(path) as beside:
            figure.savefig(beside, format=kind, dpi=120)


def _panels(runs: Sequence[Run]) -> list[list[Run]]:
    """Enough runs that differ in time alone are one panel, others each one."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_title(run, without="time"), []).append(run)
    panels = []
    for group in groups.values():
        panels += [group] if len(group) >= SWEEP else [[run] for run in group]
    return panels


def _draw_bars(runs: Sequence[Run], ax: Any) -> None:
    """Medians as bars, quartiles as whiskers, the quickest on top."""
    rows = sorted(runs[0].models, key=lambda row: -row.median)
    first, median, third = 1e3 * np.array([row.quartiles for row in rows]).T
    bars = ax.barh(
        [row.name for row in rows],
        median,
        xerr=[median - first, third - median],
        color=[_color(row.name) for row in rows],
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    ax.bar_label(bars, [seconds(row.median) for row in rows], padding=5)
    ax.set_title(_title(runs[0]), loc="left")
    ax.set_xlabel("milliseconds, median and quartiles")
    ax.margins(x=0.18)
    ax.set_xlim(left=0)


def _draw_lines(runs: Sequence[Run], ax: Any) -> None:
    """Medians against the length of the text, a line for each model."""
    from matplotlib.ticker import LogFormatter

    runs = sorted(runs, key=lambda run: run.setting["time"])
    times = [run.setting["time"] for run in runs]
    medians = [{row.name: row.median for row in run.models} for run in runs]
    for number, name in enumerate(medians[0]):
        ax.plot(
            times,
            [1e3 * found[name] for found in medians],
            "--" if name.endswith(" compiled") else "-",
            marker="osv^DP*X"[number % 8],
            color=_color(name, f"C{2 + number}"),
            label=name,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(times, [str(time) for time in times])
    ax.set(xlabel="tokens in a row", ylabel="milliseconds, median")
    ax.set_title(_title(runs[0], without="time"), loc="left")
    ax.grid(alpha=0.3)
    ax.yaxis.set_major_formatter(LogFormatter())
    ax.yaxis.set_minor_formatter(LogFormatter())
    ax.legend(loc="upper left")


def _color(name: str, peer: str = PEER) -> str:
    return next((c for n, c in COLORS.items() if name.startswith(n)), peer)


def _title(run: Run, without: str = "") -> str:
    facts = [
        f"{name} {run.setting[name]}"
        for name in TITLE
        if name in run.setting and name != without
    ]
    facts += [str(run.setting.get(name)) for name in ("dtype", "device")]
    compiled = ["eager and compiled"] if run.setting.get("compile") else []
    return ", ".join([run.what, *facts, *compiled])
