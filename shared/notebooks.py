"""Write output in notebooks and terminals: HTML, names of cells, progress."""

import html
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from tqdm import tqdm

PATIENCE = 1.0  # seconds of work before the progress line appears
PRE = "white-space: pre-wrap; line-height: 1.35"


def cell_of(file: str) -> str:
    """Return IPython's name of a cell, such as "In[2]"; "" for other files.

    A cell runs as a temporary file, whose name means nothing to the user.
    """
    compiler = getattr(_shell(), "compile", None)
    name = getattr(compiler, "format_code_name", lambda file: None)(file)
    return name[1] if name else ""


def as_html(text: str) -> str:
    """Return a text as HTML that wraps at the width of the page."""
    return f'<pre style="{PRE}">{html.escape(text)}</pre>'


class _Line(tqdm):
    """A progress line that is hidden until `appear`."""

    def display(self, *message: Any, **place: Any) -> None:
        if not self.delay:
            super().display(*message, **place)

    def appear(self) -> None:
        self.delay = 0
        self.refresh()


@contextmanager
def progress(
    total: int | None = None, wanted: bool = True
) -> "Iterator[tqdm[Any]]":
    """Yield a progress line, which is removed at the end.

    A terminal or a notebook shows the line after PATIENCE seconds, if it is
    wanted; a pipe never shows it. `set_description_str` sets its words. If
    there is a total, the line also shows the number of finished steps.
    """
    notebook = getattr(_shell(), "kernel", None) is not None
    stream = sys.stdout if notebook else sys.stderr
    if not (wanted and (notebook or stream.isatty())):
        yield tqdm(disable=True)
        return
    count = "{n_fmt}/{total_fmt} |{bar:40}| " if total else ""
    form = count + "{desc}" + " {remaining}" * bool(total)
    how = {"delay": PATIENCE, "leave": False, "bar_format": form}
    with _Line(total=total, file=stream, **how) as line:
        timer = Timer(PATIENCE, line.appear)
        timer.start()
        try:
            yield line
        finally:
            timer.cancel()
            timer.join()  # the timer might draw after the line's end


def _shell() -> Any:
    """Return IPython's shell, or None."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return find()
