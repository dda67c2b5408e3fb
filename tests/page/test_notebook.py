"""In a notebook: reprs, pictures, and errors with the user's own frames."""

import html
import io
import linecache
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpt_duet
from gpt_duet import notebooks
from gpt_duet.comparison.values import diff_by_value
from gpt_duet.invariants import UnusableModel, check_model

SOURCE = """
import torch
from torch import nn
from gpt_duet import check_model, diff_by_value, influence, prove_causality

class GPT(nn.Module):
    vocab_size, block_size = 11, 8
    def __init__(self, bad=False):
        super().__init__()
        self.bad = bad
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
    def forward(self, idx):
        if self.bad:
            return self.table(idx) @ torch.ones(3)
        return self.head(self.table(idx).flip(1))

class Sums(GPT):
    def forward(self, idx):
        return self.head(self.table(idx).cumsum(1))
"""
pytestmark = pytest.mark.unhooked  # --check-shapes would add frames
FILE = "/tmp/ipykernel_14836/3222181130.py"


@pytest.fixture
def cell(monkeypatch):
    """Run SOURCE as IPython would run the second cell; return its names."""
    name = {FILE: ("Cell", "In[2]")}
    compiler = SimpleNamespace(format_code_name=name.get)
    shell = SimpleNamespace(compile=compiler)
    fake = SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    lines = SOURCE.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, FILE, (1, None, lines, FILE))
    names = {"__name__": "__main__"}
    exec(compile(SOURCE, FILE, "exec"), names)
    return SimpleNamespace(**names)


def test_an_error_of_the_model_is_shown_with_the_users_frames(cell):
    with pytest.raises(UnusableModel) as raised:
        check_model(lambda: cell.GPT(bad=True))
    error = raised.value
    assert "(Cell In[2], line 14)" in str(error)
    files = [entry.path for entry in raised.traceback]
    room = str(Path(gpt_duet.__file__).parent)
    kits = [str(f) for f in files if str(f).startswith(room)]
    assert len(kits) == 1  # only the frame that calls the function
    frames, cause = [], error.__cause__
    while cause is not None:
        at = cause.__traceback__
        while at is not None:
            frames.append(at.tb_frame.f_code.co_filename)
            at = at.tb_next
        cause = cause.__cause__ or cause.__context__
    assert frames == [FILE]
    shown = "\n".join(error._render_traceback_())
    assert 'File "Cell In[2]", line 14, in forward\n    return self' in shown
    assert shown.splitlines()[-1] == f"UnusableModel: {error}"
    assert "_call_impl" not in shown


def test_results_are_shown_as_they_are_printed(cell):
    proof = gpt_duet.prove_causality(cell.Sums)
    report = check_model(cell.GPT, checks=["shape", "causality"])
    found = diff_by_value(cell.GPT, cell.Sums, [1, 2, 3])
    for one in (proof, report, found):
        assert repr(one) == str(one)
        shown = html.unescape(re.sub("<[^>]*>", " ", one._repr_html_()))
        words = str(one).split()
        assert {*words[:5], *words[-3:]} <= {*shown.split()}, shown
        assert "<script" not in one._repr_html_()
    assert "In[2]:19 `cumsum`" in repr(found.parted)
    assert repr(found.parted.right) == "In[2]:19 `cumsum`"
    row = repr(found.pairs[0])
    assert row.startswith("In[2]:15 `")
    assert row.endswith("(1, 3, 8) | 0 apart")
    assert "3222181130" not in repr(found) + repr(report)


def test_the_map_of_influence_is_a_picture(cell):
    # no tokens are given, so `influence` draws some
    found = gpt_duet.influence(cell.Sums())
    assert found.shape == (8, 8)
    assert found._repr_html_().startswith("<svg")
    assert type(found + 1) is torch.Tensor
    assert gpt_duet.text_map(found).count("X") == 0
    with pytest.raises(ValueError, match=r"takes ids, .* got 'hello'"):
        gpt_duet.influence(cell.Sums(), "hello")


@pytest.mark.parametrize("place", ["notebook", "terminal", "pipe"])
def test_progress_is_a_line_while_it_takes_long(cell, place, monkeypatch):
    """Notebooks and terminals show the line until the end; pipes do not."""
    shell = sys.modules["IPython"].get_ipython()
    shell.kernel = True if place == "notebook" else None
    streams = io.StringIO(), io.StringIO()
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        stream.isatty = lambda: place == "terminal"
        monkeypatch.setattr(sys, name, stream)
    for patience in (60.0, 0.0):
        monkeypatch.setattr(notebooks, "PATIENCE", patience)
        assert [stream.getvalue() for stream in streams] == ["", ""]
        check_model(cell.Sums, checks=["shape", "finite"])
        gpt_duet.influence(cell.Sums())
        with notebooks.progress(3) as line:
            line.set_description_str("tokens")
        diff_by_value(cell.GPT, cell.Sums, [1, 2, 3])
    monkeypatch.setattr(notebooks, "PATIENCE", 0.01)
    with notebooks.progress() as line:  # the line appears during one long step
        line.set_description_str("one long step")
        end = time.monotonic() + 10 * (place != "pipe")
        while time.monotonic() < end and not any(
            "one long step" in stream.getvalue() for stream in streams
        ):
            time.sleep(0.01)
    monkeypatch.undo()
    said = {
        name: stream.getvalue()
        for name, stream in zip(("notebook", "terminal"), streams, strict=True)
    }
    assert not said.pop("terminal" if place == "notebook" else "notebook")
    (shown,) = said.values()
    if place == "pipe":
        assert shown == ""
        return
    lines = [line.rstrip() for line in shown.split("\r")]
    for line in (
        "check_shape (1 of 2)",
        "check_finite (2 of 2)",
        "influence: 16 of 16 replaced tokens",
        "comparing GPT with Sums",
        "one long step",
        f"0/3 |{40 * ' '}| tokens ?",
    ):
        assert line in lines
    assert not shown.rpartition("\r")[2].strip()


@pytest.mark.slow
def test_a_notebook_as_jupyter_runs_it(tmp_path):
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    sources = [
        SOURCE,
        "check_model(GPT, checks=['causality'])",
        "from gpt_duet.notebooks import progress\n"
        "import time\n"
        "with progress() as line:\n"
        "    line.set_description_str('one long step')\n"
        "    time.sleep(2)",
        "influence(GPT())",
        "diff_by_value(GPT, Sums)",
        "check_model(lambda: GPT(bad=True))",
    ]
    cells = [*map(nbformat.v4.new_code_cell, sources)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client.NotebookClient(
        notebook, timeout=300, allow_errors=True, kernel_name="python3"
    ).execute()
    said = "".join(o.text for o in notebook.cells[2].outputs)
    assert "\rone long step" in said
    _, report, _, picture, found, bad = [
        [output for output in c.outputs if output.output_type != "stream"]
        for c in notebook.cells
    ]
    for (output,) in (report, picture, found):
        assert "text/html" in output.data
    assert "In[1]:1" in report[0].data["text/plain"]
    assert picture[0].data["text/html"].startswith("<svg")
    text = "\n".join(bad[0].traceback)
    assert "Cell In[1]" in text
    assert "invariants" not in text
    assert text.count("\n") < 20
