"""Print comparisons in a terminal."""

from rich.console import Console, RenderableType
from rich.text import Text

TWO_COLUMNS = 120  # in a narrower terminal, one side is below the other


def print_trimmed(console: Console, *blocks: RenderableType) -> None:
    """Print blocks without spaces at the end of lines."""
    with console.capture() as capture:
        console.print(*blocks, sep="\n")
    lines = [line.rstrip() for line in capture.get().splitlines()]
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
