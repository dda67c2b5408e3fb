"""The architecture of two styles as boxes along one data flow."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...protocol import Style

# What the letters of the drawing need, in its own units.
TITLE, LINE, LETTER = 22.0, 14.0, 5.5
ARROW = 42.0


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
    """What flows on, with its shape; inside a frame or not."""

    x: float
    top: float
    bottom: float
    label: str
    inside: bool = False


@dataclass(frozen=True)
class Label:
    """A word alone: a column's name ("head"), or its "end"."""

    css: str
    text: str
    x: float
    y: float


@dataclass
class Drawing:
    """Everything on one sheet, frames behind boxes.

    Attributes:
        width: of the sheet.
        height: of the sheet.
        labels: names of the columns, and what goes in and comes out.
        frames: boxes that other boxes stand in.
        boxes: one for each concept and style.
        arrows: between them.
        differences: height and largest difference of both styles there.
    """

    width: float
    height: float = 0.0
    labels: list[Label] = field(default_factory=list)
    frames: list[Box] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    differences: list[tuple[float, float]] = field(default_factory=list)


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
    inset = column / 24
    roomy = column > 250
    sheet = Drawing(width)
    lefts = (0.0, column + gap)
    middles = [x + column / 2 for x in lefts]
    y = 46.0

    def names(concept: str, room: float) -> list[tuple[str, ...]]:
        return [_names(style, concept, room) for style in styles]

    def box(
        concept: str,
        title: str,
        lines: Sequence[tuple[str, ...]],
        inset: float = 0.0,
    ) -> None:
        nonlocal y
        height = TITLE + LINE * max(map(len, lines)) + 8
        room = column - 2 * inset
        for x, own in zip(lefts, lines, strict=True):
            sheet.boxes.append(
                Box(concept, title, own, x + inset, y, room, height)
            )
        difference(concept, y + height / 2)
        y += height

    def difference(concept: str, height: float) -> None:
        if concept in differences:
            sheet.differences.append((height, differences[concept]))

    def arrow(label: str, inside: bool = False) -> None:
        nonlocal y
        for x in middles:
            sheet.arrows.append(Arrow(x, y, y + ARROW, label, inside))
        y += ARROW

    for x, style in zip(middles, styles, strict=True):
        name = short(style.__name__, column)
        sheet.labels.append(Label("head", name, x, 20))
        sheet.labels.append(Label("end", "tokens", x, y - 4))
    arrow(shapes[0])
    box("embedding", "embedding", names("embedding", column))
    arrow(shapes[1])

    top, frame = y, names("block", column)
    y += TITLE + LINE * max(map(len, frame)) + 6
    difference("block", (top + y) / 2 - 6)
    inner = column - 2 * inset
    title = "x + attention(norm(x))" if roomy else "attention"
    box("attention", title, names("attention", inner), inset)
    arrow(shapes[1], inside=True)
    title = "x + feed-forward(norm(x))" if roomy else "feed-forward"
    box("feed_forward", title, names("feed_forward", inner), inset)
    y += inset
    for x, own in zip(lefts, frame, strict=True):
        title = f"block \u00d7 {layers}"
        sheet.frames.append(Box("block", title, own, x, top, column, y - top))
    arrow(shapes[1])
    box("model", "last norm", [(short(n, column),) for n in norms])
    arrow(shapes[1])
    box("head", "head", names("head", column))
    arrow(shapes[2])
    y += 14
    sheet.labels += [Label("end", "log-probabilities", x, y) for x in middles]
    sheet.height = y + 10
    return sheet


def short(name: str, width: float) -> str:
    """Cut a name that does not fit, and show that it was cut."""
    most = int((width - 8) / LETTER)
    return name if len(name) <= most else name[: most - 1] + "\u2026"


def _names(style: Style, concept: str, width: float) -> tuple[str, ...]:
    components = style.COMPONENTS.get(concept, ())
    names = [getattr(c, "__qualname__", type(c).__name__) for c in components]
    return tuple(short(name, width) for name in names)
