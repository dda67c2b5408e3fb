"""What a notebook shows: cells by their names, results as HTML."""

import html
import sys

PRE = "white-space: pre-wrap; line-height: 1.35"


def cell_of(file: str) -> str:
    """Return IPython's name of the cell that a file stands for, or "".

    A cell runs as a temporary file whose name says nothing: "In[2]".
    """
    find = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    compiler = getattr(find(), "compile", None)
    name = getattr(compiler, "format_code_name", lambda file: None)(file)
    return name[1] if name else ""


def as_html(text: str) -> str:
    """Return a text as HTML, wrapped where the page ends."""
    return f'<pre style="{PRE}">{html.escape(text)}</pre>'
