"""Draw an influence matrix as text, as a PNG or as an HTML page."""

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..visibility import Relation, Sees, relation_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAUSAL, LEAK = (0.12, 0.47, 0.71), (0.84, 0.15, 0.16)
NEVER_USED = 0.99, 0.82, 0.45
PALE, NONE = (0.55, 0.72, 0.84), (0.97, 0.97, 0.97)
NOTHING, UNUSED, LEAKS = "\u00b7", "o", "X"
SHADES = f"{NOTHING}\u2591\u2592\u2593\u2588"
# Influences below this share of the largest are rounding, and not shown.
VISIBLE = 1e-12


def levels(matrix: Float[Tensor, "time time"]) -> Float[Tensor, "time time"]:
    """Return influences on a logarithmic scale from 0 (none) to 1."""
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
    """Return a small map for the terminal, in which X marks a leak.

    Args:
        matrix: the result of `influence`.
        sees: which tokens each position may see; None means the tokens up to
            the position itself. If given, o marks a token that may be seen and
            is not used.
    """
    time = matrix.size(0)
    level = levels(matrix)
    width = len(str(time - 1))
    allowed = _allowed(matrix, sees)
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
    matrix: Float[Tensor, "time time"],
    path: Path,
    title: str = "influence",
    sees: Sees | None = None,
) -> None:
    """Write the map to a file; a red cell is a leak.

    Args:
        matrix: the result of `influence`.
        path: a file that ends in .png or .html.
        title: title of the page.
        sees: a declaration of visibility, as for `check_model`. None means
            that no position may see a later token.

    Raises:
        ValueError: if the file ends otherwise, or a declaration depends on
            the tokens of a text.
    """
    path = Path(path)
    if path.suffix not in (".png", ".html"):
        raise ValueError(f"a map ends in .png or .html, got {path.name!r}")
    allowed = None if sees is None else relation_of(sees, matrix.size(0))
    if path.suffix == ".png":
        draw_map(matrix, allowed).savefig(path, dpi=144)
        return
    verdict = _verdict(matrix, allowed)
    path.write_text(
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{verdict}</p>\n"
        f"{svg(matrix, allowed)}\n</html>\n",
        "utf-8",
    )


def _verdict(
    matrix: Float[Tensor, "time time"], allowed: Relation | None
) -> str:
    """Return the finding of the map in one or two sentences."""
    late = matrix.masked_fill(_allowed(matrix, allowed), 0.0)
    leaks = int((levels(matrix)[late > 0] > 0).sum())
    largest = f"(the largest is {float(late.max()):.2g})"
    if allowed is None:
        if not leaks:
            return "Nothing above the diagonal: no position sees the future."
        return (
            f"{leaks} cells above the diagonal are not 0 {largest}: these "
            f"positions see the future."
        )
    unused = int((allowed & (levels(matrix) == 0)).sum())
    never = f" Cells of tokens that may be seen and are not: {unused}."
    seen = f"Cells of forbidden tokens that are seen: {leaks}"
    return seen + f" {largest}" * bool(leaks) + "." + never


def _allowed(
    matrix: Float[Tensor, "time time"], allowed: Relation | None
) -> Relation:
    """Return which tokens each position may see; by default, the past."""
    if allowed is not None:
        return allowed
    return torch.ones_like(matrix, dtype=torch.bool).tril()


def colours(
    matrix: Float[Tensor, "time time"], allowed: Relation | None = None
) -> Float[Tensor, "time time 3"]:
    """Return the colour of each cell, paler for a smaller influence."""
    level = levels(matrix).float().unsqueeze(-1)
    may = _allowed(matrix, allowed).unsqueeze(-1)
    # at least half the strength for a leak: a faint one must be visible
    strength = torch.where(~may & (level > 0), level.clamp(min=0.5), level)
    full = torch.where(may, torch.tensor(CAUSAL), torch.tensor(LEAK))
    found = torch.lerp(torch.tensor(NONE), full, strength)
    if allowed is None:
        return found
    return torch.where(may & (level == 0), torch.tensor(NEVER_USED), found)


def draw_map(
    matrix: Float[Tensor, "time time"], allowed: Relation | None = None
) -> "Figure":
    """Return the map as a figure of matplotlib, with axes and a legend."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 6.6 if allowed is None else 6.9  # room for a longer legend
    figure = Figure(figsize=(6, height), layout="constrained")
    axes = figure.add_subplot()
    shown = colours(matrix, allowed).numpy()
    axes.imshow(shown, interpolation="nearest")
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
    if allowed is not None:
        legend.pop("leak: a later token is seen")
        legend["leak: a forbidden token is seen"] = LEAK
        legend["never used, though it may be seen"] = NEVER_USED
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


def svg(
    matrix: Float[Tensor, "time time"], allowed: Relation | None = None
) -> str:
    """Return the map as an element of an HTML page."""
    file = io.StringIO()
    draw_map(matrix, allowed).savefig(file, format="svg")
    return f"<svg{file.getvalue().partition('<svg')[2]}"
