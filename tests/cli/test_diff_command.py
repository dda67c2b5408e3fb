"""gpt-duet diff shows the source of two styles, at any width, paged
or piped."""

import inspect
import re
import subprocess
import sys
from functools import partial
from io import StringIO

import pytest
import third_style
import torch
from rich.console import Console

from gpt_duet import annotated, mingpt_style
from gpt_duet.comparison.concepts import CONCEPTS as KNOWN
from gpt_duet.comparison.sources import pair_sources, read_part
from gpt_duet.comparison.terminal import show_sources

CONCEPTS = ["embedding", "attention", "feed_forward", "block", "model", "head"]


@pytest.fixture
def diff(done, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return partial(done, "diff")


def squeezed(text):
    """Return a text without spaces and line numbers, in a single line."""
    lines = (re.sub(r"^ *\d+ ", "", line) for line in text.splitlines())
    return re.sub(r"\s", "", "".join(lines))


@pytest.mark.parametrize("concept", CONCEPTS)
def test_everything_is_shown_side_by_side(diff, concept):
    out, err = diff(concept, "--width=200")
    assert err == ""
    assert "\x1b" not in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    for style in (annotated, mingpt_style):
        for component in style.COMPONENTS[concept]:
            assert component.__qualname__ in out
            lines, first = inspect.getsourcelines(component)
            for number, line in enumerate(lines, start=max(first, 1)):
                code = re.escape(line.strip())
                assert re.search(rf"\b{number} +{code}", out) or not code


@pytest.mark.parametrize("width", [40, 119])
def test_a_narrow_diff_is_stacked_and_nothing_is_lost(diff, width):
    out, _ = diff("attention", "--width", width)
    assert max(map(len, out.splitlines())) <= width
    found = squeezed(out)
    left = found.index("classMultiHeadedAttention(nn.Module)")
    right = found.index("classCausalSelfAttention(nn.Module)")
    # the whole left side is printed before the right side
    assert "self.linears[-1](x)" in found[left:right]
    for component in (annotated.attention, mingpt_style.CausalSelfAttention):
        for line in inspect.getsource(component).splitlines():
            assert re.sub(r"\s", "", line) in found, line


@pytest.mark.parametrize("width", [120, 200])
def test_a_wide_diff_has_two_columns(diff, width):
    out, _ = diff("attention", "--width", width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert any(
        "class MultiHeadedAttention" in line
        and "class CausalSelfAttention" in line
        for line in lines
    )
    starts = [line for line in lines if re.match(r" +\d+ +def forward", line)]
    assert any(line.count("def forward(") == 2 for line in starts)


def test_a_part_of_a_concept_is_shown_by_its_name(diff):
    out, err = diff("norm", "--width=200")
    assert err == ""
    assert "class LayerNorm" in out
    assert "def layer_norm" in out
    assert "class SublayerConnection" not in out


def test_parts_are_next_to_their_counterparts():
    """The caches are a pair; the function `attention` has no counterpart."""
    pairs = {
        pair.left.name: pair.right.name if pair.right else None
        for pair in pair_sources(annotated, mingpt_style)["attention"]
        if pair.left
    }
    assert pairs == {
        "MultiHeadedAttention": "CausalSelfAttention",
        "attention": None,
        "CachedAttention": "KeyValueCache",
    }


def test_without_a_concept_all_are_shown(diff):
    out, _ = diff("--width=170")
    titles = [f"{name}  {concept.does}" for name, concept in KNOWN.items()]
    assert list(KNOWN) == CONCEPTS
    assert [line for line in out.splitlines() if line in titles] == titles


@pytest.mark.parametrize(("height", "is_long"), [(300, False), (30, True)])
def test_long_output_is_paged_in_a_terminal(monkeypatch, height, is_long):
    paged = []
    show = "rich.pager.SystemPager.show"
    monkeypatch.setattr(show, lambda pager, content: paged.append(content))
    console = Console(
        file=StringIO(), force_terminal=True, width=170, height=height
    )
    sources = pair_sources(annotated, mingpt_style)
    show_sources(
        console,
        ("annotated", "mingpt_style"),
        {"attention": sources["attention"]},
    )
    shown = paged[0] if is_long else console.file.getvalue()
    assert len(paged) == is_long
    assert "CausalSelfAttention" in shown
    assert "\x1b[" in shown  # colour codes of a terminal


@pytest.mark.slow
def test_a_pager_that_closes_early_is_no_error():
    program = (
        f"set -o pipefail; {sys.executable} -m gpt_duet.cli diff | head -1"
    )
    command = ["bash", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_a_mistake_ends_in_one_line(refused):
    known = refused("diff", "nonsense")
    assert all(word in known for word in ("'nonsense'", *CONCEPTS))
    assert "width must be at least 40, got 39" in refused("diff", "--width=39")


def test_a_third_style_is_shown_next_to_another():
    before = torch.get_rng_state()
    sources = pair_sources(annotated, third_style)
    assert torch.equal(before, torch.get_rng_state())
    console = Console(file=StringIO(), width=200)
    show_sources(console, ("annotated", "third_style"), sources)
    out = console.file.getvalue()
    # parts are paired by their place in the model, not by their order
    for left, right in (
        ("class MultiHeadedAttention", "class Heads"),
        ("class DecoderLayer", "class Layer"),
    ):
        assert any(left in s and right in s for s in out.splitlines())
    assert "third_style.py:" in out
    # concepts that only this style has are shown as well
    assert list(sources) == [*CONCEPTS, "weights"]
    assert "no counterpart" in out


def test_source_that_cannot_be_found_is_named():
    with pytest.raises(ValueError, match="no source of int"):
        read_part(int)
