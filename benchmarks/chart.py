"""Results as a picture: bars for each setting, lines for a sweep of times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.files import replace_file

from .growth import Growth, growth
from .results import Results, Run, describe
from .tables import seconds

SUFFIXES = (".svg", ".png")
# one colour for each style, one for all peers, one for the machine
COLORS = {"annotated": "#b45f06", "mingpt_style": "#2166ac"}
PEER, LIMIT = "#9a9a9a", "#d9d9d9"


def require_picture(path: Path | None) -> None:
    """Refuse a name that says no format.

    Raises:
        ValueError: for a suffix that is neither .svg nor .png.
    """
    if path is not None and path.suffix not in SUFFIXES:
        raise ValueError(f"a plot ends in .svg or .png, got {path.name}")


def eager_forward(results: Results) -> Results:
    """Leave all out but the forward passes that were not compiled."""
    kept = [
        run
        for run in results.runs
        if run.what == "forward" and not run.setting.get("compile")
    ]
    return Results(results.machine, kept)


def draw(results: Results, path: Path) -> None:
    """Draw every run as bars, and sweeps of time as lines.

    The same results give the same file, byte by byte.

    Args:
        results: what was measured.
        path: of the picture, .svg or .png; an old one is replaced.

    Raises:
        ValueError: for results without a single run that can be drawn.
    """
    # slow to import, and only a picture needs it
    import matplotlib
    from matplotlib.figure import Figure

    lines = growth(results.runs)
    swept = {time for g in lines for time in g.times} if lines else set()
    bars = [run for run in results.runs if _stands_alone(run, lines, swept)]
    panels: list[Any] = [*bars, *([lines] if lines else [])]
    if not panels:
        raise ValueError("there is nothing to draw: no run has any rows")
    heights = [
        1.1 + 0.3 * len(p.models) if isinstance(p, Run) else 4 for p in panels
    ]
    with matplotlib.rc_context(
        {"svg.hashsalt": "gpt-duet", "font.size": 9, "svg.fonttype": "path"}
    ):
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        axes = figure.subplots(
            len(panels), squeeze=False, height_ratios=heights
        )[:, 0]
        for panel, ax in zip(panels, axes, strict=True):
            if isinstance(panel, Run):
                _draw_bars(panel, ax)
            else:
                _draw_lines(panel, ax)
        figure.supxlabel(_machine(results), fontsize=7, color="#555555")
        kind = path.suffix.removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        with replace_file(path) as beside:
            figure.savefig(beside, format=kind, metadata=metadata, dpi=120)


def _stands_alone(run: Run, lines: Sequence[Growth], swept: set[int]) -> bool:
    """Whether a run has rows, and is no point of a line."""
    if not run.models:
        return False
    names = {row.name for row in run.models}
    ours = [g for g in lines if g.name in names]
    point = run.what == "forward" and run.setting.get("time") in swept
    return not (point and any(_is_point(run, g) for g in ours))


def _is_point(run: Run, line: Growth) -> bool:
    row = run.row(line.name)
    return row is not None and row.timing.median in line.seconds


def _draw_bars(run: Run, ax: Any) -> None:
    """Medians as bars, quartiles as whiskers, the quickest on top."""
    rows = sorted(run.models, key=lambda row: -row.timing.median)
    for place, row in enumerate(rows):
        first, median, third = (1e3 * s for s in row.timing.quartiles)
        ax.barh(
            place,
            median,
            xerr=[[median - first], [third - median]],
            color=_color(row.name),
            error_kw={"elinewidth": 1, "capsize": 2},
        )
        ax.annotate(
            seconds(row.timing.median),
            (third, place),
            textcoords="offset points",
            xytext=(5, 0),
            va="center",
        )
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.set_title(_title(run), loc="left")
    ax.set_xlabel("milliseconds, median and quartiles")
    ax.margins(x=0.18)
    ax.set_xlim(left=0)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_lines(lines: Sequence[Growth], ax: Any) -> None:
    """Time against length, and the formula's growth from the first point."""
    for g in lines:
        ax.plot(
            g.times,
            [1e3 * s for s in g.seconds],
            marker="o",
            color=_color(g.name),
            label=f"{g.name}: operations^{g.exponent:.2f}",
        )
        ax.plot(
            g.times,
            [1e3 * g.seconds[0] * f / g.flops[0] for f in g.flops],
            linestyle=":",
            color=_color(g.name),
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = sorted({time for g in lines for time in g.times})
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set(xlabel="tokens in a row", ylabel="milliseconds")
    ax.set_title(
        "growth with the text; dotted: as the operations grow", loc="left"
    )
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)


def _color(name: str) -> str:
    return next((c for n, c in COLORS.items() if name.startswith(n)), PEER)


def _title(run: Run) -> str:
    s = run.setting
    shape = f"{run.what} {s.get('shape', '')}".strip()
    parts = [
        f"{k} {s[k]}" for k in ("batch", "time", "prompt", "new") if k in s
    ]
    parts += [str(s[k]) for k in ("dtype", "device") if k in s]
    compiled = ["eager and compiled"] if s.get("compile") else []
    return ", ".join([shape, *parts, *compiled]) if s else describe(run)


def _machine(results: Results) -> str:
    facts = results.machine
    names = ("processor", "accelerator", "torch", "transformers")
    told = [f"{facts[name]}" for name in names[:1] if name in facts]
    if facts.get("accelerator", "none") != "none":
        told.append(str(facts["accelerator"]))
    threads = {run.setting.get("threads") for run in results.runs} - {None}
    told += [f"threads {n}" for n in sorted(threads, key=str)]
    told += [f"{name} {facts[name]}" for name in names[2:] if name in facts]
    return ", ".join(told)
