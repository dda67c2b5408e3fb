"""Output for a person: results as HTML, notebook cells, a progress line."""

import html
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from tqdm import tqdm

PATIENCE = 1.0  # seconds of work before its line appears
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


class _Line(tqdm):
    """A line that is hidden while it has a delay."""

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
    """Yield a line on the step that runs; it goes at the end.

    A terminal or a notebook shows it after PATIENCE seconds, if it is wanted;
    a pipe never does. Its words are those of `set_description_str`; before
    them stands how many steps of the total are done.
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
            timer.join()  # else it might draw after the end


def _shell() -> Any:
    """Return IPython's shell, None where none runs."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return find()
