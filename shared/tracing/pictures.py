"""An influence matrix as text, as a PNG and as an HTML page."""

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAUSAL, LEAK = (0.12, 0.47, 0.71), (0.84, 0.15, 0.16)
PALE, NONE = (0.55, 0.72, 0.84), (0.97, 0.97, 0.97)
NOTHING, UNUSED, LEAKS = "\u00b7", "o", "X"
SHADES = f"{NOTHING}\u2591\u2592\u2593\u2588"
# Influences are shown from this share of the largest one on: what is below
# is rounding.
VISIBLE = 1e-12


def levels(matrix: Float[Tensor, "time time"]) -> Float[Tensor, "time time"]:
    """Return influences on a logarithmic scale from 0 to 1; 0 is none."""
    largest = float(matrix.nan_to_num(posinf=0.0).max())
    if largest == 0:
        return torch.zeros_like(matrix)
    share = matrix.nan_to_num(nan=largest, posinf=largest) / largest
    scaled = 1 + share.clamp(min=VISIBLE).log10() / 12
    return torch.where(share > VISIBLE, scaled.clamp(0.15, 1.0), 0.0)


def text_map(
    matrix: Float[Tensor, "time time"],
    sees: Bool[Tensor, "time time"] | None = None,
) -> str:
    """Return a small map for the terminal: X is a token seen against the rule.

    Args:
        matrix: of `influence`.
        sees: which token each position may see; None: those up to its own.
            Then a token that may be seen and is not is an o.
    """
    time = matrix.size(0)
    level = levels(matrix)
    width = len(str(time - 1))
    allowed = torch.ones_like(level, dtype=torch.bool).tril()
    allowed = allowed if sees is None else sees
    unused = NOTHING if sees is None else UNUSED
    lines = ["influence: output position (down) by input token (across)"]
    for i, row in enumerate(level.tolist()):
        cells = [
            (SHADES[min(4, int(value * 4) + 1)] if value else unused)
            if may
            else (LEAKS if value else NOTHING)
            for value, may in zip(row, allowed[i].tolist(), strict=True)
        ]
        lines.append(f"{i:>{width}} {' '.join(cells)}")
    return "\n".join(lines)


def save_map(
    matrix: Float[Tensor, "time time"], path: Path, title: str = "influence"
) -> None:
    """Write the map: red above the diagonal is a leak.

    Args:
        matrix: of `influence`.
        path: a file that ends in .png or .html.
        title: of the page.

    Raises:
        ValueError: for another ending.
    """
    path = Path(path)
    if path.suffix not in (".png", ".html"):
        raise ValueError(f"a map ends in .png or .html, got {path.name!r}")
    if path.suffix == ".png":
        draw_map(matrix).savefig(path, dpi=144)
        return
    leaks = int((levels(matrix).triu(1) > 0).sum())
    verdict = (
        f"{leaks} cells above the diagonal are not 0 (the largest is "
        f"{float(matrix.triu(1).max()):.2g}): these positions see the future."
        if leaks
        else "Nothing above the diagonal: no position sees the future."
    )
    path.write_text(
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{verdict}</p>\n"
        f"{svg(matrix)}\n</html>\n",
        "utf-8",
    )


def colours(
    matrix: Float[Tensor, "time time"],
) -> Float[Tensor, "time time 3"]:
    """Return the colour of each cell: paler where the influence is smaller."""
    level = levels(matrix).float().unsqueeze(-1)
    early = torch.ones_like(matrix, dtype=torch.bool).triu(1).unsqueeze(-1)
    # a faint leak must not look like none
    strength = torch.where(early & (level > 0), level.clamp(min=0.5), level)
    full = torch.where(early, torch.tensor(LEAK), torch.tensor(CAUSAL))
    return torch.lerp(torch.tensor(NONE), full, strength)


def draw_map(matrix: Float[Tensor, "time time"]) -> "Figure":
    """Return the map as a figure of matplotlib, with axes and a legend."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(6, 6.6), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(colours(matrix).numpy(), interpolation="nearest")
    axes.set_xlabel("input token that is changed")
    axes.set_ylabel("output position whose scores move")
    axes.locator_params(integer=True)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    legend = {
        "large influence": CAUSAL,
        "small (logarithmic)": PALE,
        "no influence": NONE,
        "leak: a later token is seen": LEAK,
    }
    figure.legend(
        handles=[
            Patch(facecolor=colour, edgecolor="0.8", label=label)
            for label, colour in legend.items()
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


def svg(matrix: Float[Tensor, "time time"]) -> str:
    """Return the map as an element of an HTML page."""
    file = io.StringIO()
    draw_map(matrix).savefig(file, format="svg")
    return f"<svg{file.getvalue().partition('<svg')[2]}"
