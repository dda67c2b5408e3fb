"""An influence matrix as text, as a PNG and as an HTML page."""

import html
import os
import struct
import zlib
from pathlib import Path

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

CAUSAL, LEAK, EMPTY = (31, 119, 180), (214, 39, 40), (247, 247, 247)
GRID, INK = (210, 210, 210), (60, 60, 60)
SHADES = "\u2591\u2592\u2593\u2588"
# A leak is shown from this share of the largest influence on: in the map
# rounding is white.
VISIBLE = 1e-12

# Digits for the axes, three columns by five rows, a row as three bits.
DIGITS = {
    "0": (7, 5, 5, 5, 7),
    "1": (2, 6, 2, 2, 7),
    "2": (7, 1, 7, 4, 7),
    "3": (7, 1, 7, 1, 7),
    "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7),
    "6": (7, 4, 7, 5, 7),
    "7": (7, 1, 2, 2, 2),
    "8": (7, 5, 7, 5, 7),
    "9": (7, 5, 7, 1, 7),
}


def levels(matrix: Float[Tensor, "time time"]) -> Float[Tensor, "time time"]:
    """Return influences on a logarithmic scale from 0 to 1; 0 is none."""
    largest = float(matrix.nan_to_num(posinf=0.0).max())
    if largest == 0:
        return torch.zeros_like(matrix)
    share = matrix.nan_to_num(nan=largest, posinf=largest) / largest
    scaled = 1 + share.clamp(min=VISIBLE).log10() / 12
    return torch.where(share > VISIBLE, scaled.clamp(0.15, 1.0), 0.0)


def text_map(matrix: Float[Tensor, "time time"]) -> str:
    """Return a small map for the terminal: X is a position seen too early."""
    time = matrix.size(0)
    level = levels(matrix)
    width = len(str(time - 1))
    lines = ["influence: output position (down) by input token (across)"]
    for i in range(time):
        cells = []
        for j in range(time):
            value = float(level[i, j])
            if value == 0:
                cells.append("\u00b7")
            elif j > i:
                cells.append("X")
            else:
                cells.append(SHADES[min(3, int(value * 4))])
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
    if path.suffix == ".png":
        content = png(draw_map(matrix))
    elif path.suffix == ".html":
        content = page(matrix, title).encode()
    else:
        raise ValueError(f"a map ends in .png or .html, got {path.name!r}")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def colour(level: float, leak: bool) -> tuple[int, int, int]:
    """Return the colour of a cell: paler where the influence is smaller."""
    if level == 0:
        return EMPTY
    full = LEAK if leak else CAUSAL
    # a faint leak must not look like none
    strength = max(level, 0.5) if leak else level
    r, g, b = (
        round(e + (f - e) * strength) for e, f in zip(EMPTY, full, strict=True)
    )
    return r, g, b


def draw_map(
    matrix: Float[Tensor, "time time"],
) -> Shaped[Tensor, "height width 3"]:
    """Return the map as pixels: cells, grid, and positions on both axes."""
    time = matrix.size(0)
    cell = max(3, min(24, 768 // time))
    margin = 28
    size = margin + time * cell + 9
    image = torch.full((size, size, 3), 255, dtype=torch.uint8)
    level = levels(matrix)
    for i in range(time):
        for j in range(time):
            y, x = margin + i * cell, margin + j * cell
            image[y : y + cell, x : x + cell] = torch.tensor(
                colour(float(level[i, j]), j > i), dtype=torch.uint8
            )
    if cell >= 6:
        lines = [margin + i * cell for i in range(time + 1)]
        end = lines[-1] + 1
        image[lines, margin:end] = torch.tensor(GRID, dtype=torch.uint8)
        image[margin:end, lines] = torch.tensor(GRID, dtype=torch.uint8)
    step = max(1, -(-24 // cell))
    for i in range(0, time, step):
        middle = margin + i * cell + cell // 2
        _write(image, str(i), middle - 4, margin - 6, right=True)
        _write(image, str(i), margin - 14, middle, right=False)
    return image


def _write(
    image: Shaped[Tensor, "height width 3"],
    number: str,
    y: int,
    x: int,
    right: bool,
) -> None:
    """Write digits at twice their size, ending at x or centred there."""
    wide = 8 * len(number) - 2
    x = max(0, x - wide if right else x - wide // 2)
    y = max(0, y)
    for digit in number:
        for row, bits in enumerate(DIGITS[digit]):
            for column in range(3):
                if bits >> (2 - column) & 1:
                    top, left = y + 2 * row, x + 2 * column
                    image[top : top + 2, left : left + 2] = torch.tensor(
                        INK, dtype=torch.uint8
                    )
        x += 8


def png(image: Shaped[Tensor, "height width 3"]) -> bytes:
    """Return pixels as a PNG file.

    Source: the PNG specification (ISO/IEC 15948): signature, header, one
    compressed run of rows, end.
    """
    height, width, _ = image.shape
    rows = torch.cat(
        [torch.zeros(height, 1, dtype=torch.uint8), image.flatten(1)], dim=1
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", checksum)
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.numpy().tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def page(matrix: Float[Tensor, "time time"], title: str) -> str:
    """Return the map as a page of its own, a number behind each cell."""
    time = matrix.size(0)
    cell = max(4, min(24, 720 // time))
    level = levels(matrix)
    parts = []
    for i in range(time):
        for j in range(time):
            r, g, b = colour(float(level[i, j]), j > i)
            parts.append(
                f'<rect x="{j * cell}" y="{i * cell}" width="{cell}" '
                f'height="{cell}" fill="rgb({r},{g},{b})"><title>output {i}, '
                f"input {j}: {float(matrix[i, j]):.3g}</title></rect>"
            )
    early = matrix.triu(1)
    leaks = int((levels(matrix).triu(1) > 0).sum())
    verdict = (
        f"{leaks} cells above the diagonal are not 0 (the largest is "
        f"{float(early.max()):.2g}): these positions see the future."
        if leaks
        else "Nothing above the diagonal: no position sees the future."
    )
    step = max(1, -(-24 // cell))
    ticks = "".join(
        f'<text x="{i * cell + cell / 2}" y="-6" text-anchor="middle">{i}'
        f'</text><text x="-6" y="{i * cell + cell / 2 + 4}" '
        f'text-anchor="end">{i}</text>'
        for i in range(0, time, step)
    )
    side = time * cell
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n<style>"
        "body{font:14px system-ui,sans-serif;margin:2em}"
        "rect{stroke:#d2d2d2;stroke-width:.5}text{font-size:11px}</style>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{verdict}</p>\n"
        f'<svg role="img" aria-label="{verdict}" width="{side + 60}" '
        f'height="{side + 60}" viewBox="-50 -40 {side + 60} {side + 60}">\n'
        f'<text x="{side / 2}" y="-24" text-anchor="middle">input token'
        f"</text>{ticks}\n"
        f'<text transform="translate(-38 {side / 2}) rotate(-90)" '
        f'text-anchor="middle">output position</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n</html>\n"
    )
