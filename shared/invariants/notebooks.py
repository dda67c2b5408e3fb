"""Output for a person: results as HTML, notebook cells, a progress line."""

import html
import sys
import time
from threading import Timer
from typing import Any

PATIENCE = 1.0  # seconds of work before its progress is shown
PRE = "white-space: pre-wrap; line-height: 1.35"


def cell_of(file: str) -> str:
    """Return IPython's name of the cell that a file stands for, or "".

    A cell runs as a temporary file whose name says nothing: "In[2]".
    """
    compiler = getattr(_shell(), "compile", None)
    name = getattr(compiler, "format_code_name", lambda file: None)(file)
    return name[1] if name else ""


def as_html(text: str) -> str:
    """Return a text as HTML, wrapped where the page ends."""
    return f'<pre style="{PRE}">{html.escape(text)}</pre>'


class Progress:
    """A line that names the step that runs, rewritten as steps change.

    It appears once the work has taken PATIENCE seconds, in a terminal or a
    notebook and never in a pipe, and is cleared at the end.
    """

    def __init__(self) -> None:
        notebook = getattr(_shell(), "kernel", None) is not None
        self._stream = sys.stdout if notebook else sys.stderr
        self._seen = notebook or self._stream.isatty()
        self._words, self._width, self._began = "", 0, time.monotonic()
        self._timer = Timer(PATIENCE, self._draw)

    def __enter__(self) -> "Progress":
        if self._seen:
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._seen:
            self._timer.cancel()
            self._timer.join()
            self.show("")

    def show(self, words: str) -> None:
        """Show some words, none to clear the line for other output."""
        self._words = words
        if self._seen and time.monotonic() - self._began >= PATIENCE:
            self._draw()

    def _draw(self) -> None:
        words = f"{self._words:<{self._width}}"
        if words:
            end = "" if self._words else "\r"
            print(f"\r{words}", end=end, file=self._stream, flush=True)
        self._width = len(self._words)


def _shell() -> Any:
    """Return IPython's shell, None where none runs."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return find()
