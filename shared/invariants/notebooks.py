"""Output for a person: results as HTML, notebook cells, a progress line."""

import html
import sys
from typing import Any

from tqdm import tqdm

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


def progress(total: int | None = None, wanted: bool = True) -> "tqdm[Any]":
    """Return a line on the step that runs, gone at the end.

    A terminal or a notebook shows it, if it is wanted; a pipe never does.
    Its words are those of `set_description_str`; before them stands how
    many steps of the total are done.
    """
    notebook = getattr(_shell(), "kernel", None) is not None
    stream = sys.stdout if notebook else sys.stderr
    hidden = not (wanted and (notebook or stream.isatty()))
    count = "{n_fmt}/{total_fmt} |{bar:40}| " if total else ""
    form = count + "{desc}" + " {remaining}" * bool(total)
    return tqdm(
        file=stream, disable=hidden, leave=False, total=total, bar_format=form
    )


def _shell() -> Any:
    """Return IPython's shell, None where none runs."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return find()
