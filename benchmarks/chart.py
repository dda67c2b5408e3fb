"""Draw results as pictures: bars, and lines for a sweep."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gpt_duet.benchmark_results import Results, Run
from gpt_duet.files import replace_file

from .tables import seconds

# a colour for each style, and one for all peers
COLORS = {"annotated": "#b45f06", "mingpt_style": "#2166ac"}
PEER = "#9a9a9a"
SWEEP = 3  # fewest sizes that are drawn as lines; fewer are drawn as bars
AXES = {"time": "tokens in a row", "prompt": "tokens read", "batch": "rows"}
TITLE = ("shape", "layers", "width", "batch", "time", "prompt", "new")


def draw(results: Results, path: Path) -> None:
    """Draw each run as bars; draw a sweep of lengths or rows as lines."""
    panels = _panels(results.runs)
    sizes = [4 if axis else 1.1 + 0.3 * len(r[0].models) for axis, r in panels]
    with _figure(results, path, sizes) as axes:
        for (axis, runs), ax in zip(panels, axes, strict=True):
            if axis:
                _draw_lines(runs, ax, axis)
            else:
                _draw_bars(runs[0], ax)


@contextmanager
def _figure(
    results: Results, path: Path, heights: Sequence[float]
) -> Iterator[Any]:
    """Yield axes of these heights; then write the figure, with the facts."""
    # matplotlib is slow to import, and only pictures need it
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "path"}):
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        ratios: Any = {"squeeze": False, "height_ratios": heights}
        axes = figure.subplots(len(heights), **ratios)[:, 0]
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
        yield axes
        facts = ", ".join(f"{k} {v}" for k, v in results.machine.items())
        words = textwrap.fill(facts, 130)
        figure.supxlabel(words, fontsize=7, color="#555555")
        kind = path.suffix.removeprefix(".")
        with replace_file(path) as beside:
            figure.savefig(beside, format=kind, dpi=120)


def _panels(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Group runs that differ in one size, to draw lines; others get bars."""
    panels: list[tuple[str, list[Run]]] = []
    alone = list(runs)
    for axis in AXES:
        groups: dict[str, list[Run]] = {}
        for run in runs:
            if axis in run.setting:
                groups.setdefault(_title(run, axis), []).append(run)
        swept = [group for group in groups.values() if len(group) >= SWEEP]
        panels += [(axis, group) for group in swept]
        alone = [r for r in alone if not any(r in group for group in swept)]
    return panels + [("", [run]) for run in alone]


def _draw_bars(run: Run, ax: Any) -> None:
    """Draw medians as bars and quartiles as whiskers, the fastest on top."""
    rows = sorted(run.models, key=lambda row: -row.median)
    first, median, third = 1e3 * np.array([row.quartiles for row in rows]).T
    names = [row.name for row in rows]
    colours = [_color(name) for name in names]
    spread = [median - first, third - median]
    caps = {"elinewidth": 1, "capsize": 2}
    bars = ax.barh(names, median, xerr=spread, color=colours, error_kw=caps)
    ax.bar_label(bars, [seconds(row.median) for row in rows], padding=5)
    ax.set_title(_title(run), loc="left")
    ax.set_xlabel("milliseconds, median and quartiles")
    ax.margins(x=0.18)
    ax.set_xlim(left=0)


def _draw_lines(runs: Sequence[Run], ax: Any, axis: str) -> None:
    """Draw medians by the length of the text, or by the number of rows."""
    from matplotlib.ticker import LogFormatter

    runs = sorted(runs, key=lambda run: run.setting[axis])
    times = [run.setting[axis] for run in runs]
    medians = [{row.name: row.median for row in run.models} for run in runs]
    for number, name in enumerate(medians[0]):
        taken = [1e3 * found[name] for found in medians]
        line = "--" if name.endswith(" compiled") else "-"
        ax.plot(times, taken, line, **_style(name, number))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(times, [str(time) for time in times])
    ax.set(xlabel=AXES[axis], ylabel="milliseconds, median")
    ax.set_title(_title(runs[0], axis), loc="left")
    ax.grid(alpha=0.3)
    ax.yaxis.set_major_formatter(LogFormatter())
    ax.yaxis.set_minor_formatter(LogFormatter())
    ax.legend(loc="upper left")


def _style(name: str, number: int) -> dict[str, str]:
    """Return the mark, colour and label of a model's line."""
    mark, colour = "osv^DP*X"[number % 8], _color(name, f"C{2 + number}")
    return {"marker": mark, "color": colour, "label": name}


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
