"""Draw losses by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import replace_file

Points = Sequence[Sequence[float]]


def draw_losses(path: Path, curves: Mapping[str, Points], title: str) -> None:
    """Write a PNG of the losses by step, in nats a token.

    Each curve has (step, loss) points; a curve of many points is thin.
    """
    # matplotlib is slow to import, and only the end of a run needs it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        steps, losses = zip(*points, strict=True) if points else ((), ())
        few = len(points) <= 50
        axes.plot(
            steps,
            losses,
            label=name,
            marker="o" if few else "",
            linewidth=1.8 if few else 0.6,
            alpha=1.0 if few else 0.6,
        )
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with replace_file(path) as beside:
        figure.savefig(beside, format="png")
