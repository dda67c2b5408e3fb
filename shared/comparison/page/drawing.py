"""The architecture of two styles as boxes along one data flow."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.protocol import Style

# What the letters of the drawing need, in its own units.
TITLE, LINE, LETTER = 22, 14, 5.6
ARROW, INSET = 34, 12


@dataclass(frozen=True)
class Box:
    """A concept as one style writes it.

    Attributes:
        concept: what a click leads to.
        title: what stands at the top.
        names: what implements it, one name a line.
    """

    concept: str
    title: str
    names: tuple[str, ...]
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Arrow:
    """What flows on, with its shape."""

    x: float
    top: float
    bottom: float
    label: str


@dataclass(frozen=True)
class Apart:
    """The largest difference of both styles at one height."""

    x: float
    y: float
    text: str


@dataclass
class Drawing:
    """Everything on one sheet, frames behind boxes.

    Attributes:
        width: of the sheet.
        height: of the sheet.
        heads: names of the columns, with their middle.
        frames: boxes that other boxes stand in.
        boxes: one for each concept and style.
        arrows: between them.
        aparts: in the middle.
    """

    width: float
    height: float = 0
    heads: list[tuple[float, str]] = field(default_factory=list)
    frames: list[Box] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    aparts: list[Apart] = field(default_factory=list)


def draw(
    styles: tuple[Style, Style],
    layers: int,
    shapes: tuple[str, str, str],
    differences: dict[str, float],
    norms: tuple[str, str],
    width: float,
    gap: float,
) -> Drawing:
    """Lay both styles out, the same height for the same concept.

    Args:
        styles: the two.
        layers: number of blocks.
        shapes: of tokens, features and log-probabilities, as measured.
        differences: the largest at each concept.
        norms: class names of both styles' last norms.
        width: of the sheet.
        gap: between the columns.
    """
    column = (width - gap) / 2
    sheet = Drawing(width)
    lefts = (0.0, column + gap)
    middles = [x + column / 2 for x in lefts]
    y = 40.0
    for x, style in zip(middles, styles, strict=True):
        sheet.heads.append((x, short(style.__name__, column)))
    sheet.arrows += [
        Arrow(x, y - 6, y + ARROW, f"tokens {shapes[0]}") for x in middles
    ]
    y += ARROW

    def names(concept: str, inset: float) -> list[tuple[str, ...]]:
        return [_names(s, concept, column - 2 * inset) for s in styles]

    def box(
        concept: str,
        title: str,
        lines: Sequence[tuple[str, ...]],
        inset: float = 0,
    ) -> None:
        nonlocal y
        height = TITLE + LINE * max(map(len, lines)) + 8
        for x, own in zip(lefts, lines, strict=True):
            sheet.boxes.append(
                Box(
                    concept,
                    title,
                    own,
                    x + inset,
                    y,
                    column - 2 * inset,
                    height,
                )
            )
        y += height
        if concept in differences:
            text = f"{differences[concept]:.1e}"
            sheet.aparts.append(Apart(width / 2, y - height / 2, text))

    def arrow(label: str) -> None:
        nonlocal y
        sheet.arrows.extend(Arrow(x, y, y + ARROW, label) for x in middles)
        y += ARROW

    box("embedding", "embedding", names("embedding", 0))
    arrow(shapes[1])

    top, inside = y, names("block", 0)
    y += TITLE + LINE * max(map(len, inside)) + 6
    box("attention", "norm, attention, +", names("attention", INSET), INSET)
    arrow(shapes[1])
    box(
        "feed_forward",
        "norm, feed-forward, +",
        names("feed_forward", INSET),
        INSET,
    )
    y += INSET
    for x, own in zip(lefts, inside, strict=True):
        title = f"block \u00d7 {layers}"
        sheet.frames.append(Box("block", title, own, x, top, column, y - top))
    arrow(shapes[1])
    box("model", "last norm", [(short(n, column),) for n in norms])
    arrow(shapes[1])
    box("head", "head", names("head", 0))
    arrow(f"log-probabilities {shapes[2]}")
    sheet.height = y + 8
    return sheet


def short(name: str, width: float) -> str:
    """Cut a name that does not fit, and show that it was cut."""
    most = int((width - 8) / LETTER)
    return name if len(name) <= most else name[: most - 1] + "\u2026"


def _names(style: Style, concept: str, width: float) -> tuple[str, ...]:
    components = style.COMPONENTS.get(concept, ())
    names = [getattr(c, "__qualname__", type(c).__name__) for c in components]
    return tuple(short(name, width) for name in names)
