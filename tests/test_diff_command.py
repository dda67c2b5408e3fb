"""gpt-duet diff: the source of two styles, at every width, paged or piped."""

import inspect
import re
import subprocess
import sys
import textwrap
from functools import partial
from io import StringIO

import pytest
import third_style
import torch
from rich.console import Console

import annotated
import mingpt_style
from shared.comparison.concepts import CONCEPTS as KNOWN
from shared.comparison.sources import pair_sources, read_part
from shared.comparison.terminal import show_sources

CONCEPTS = ["embedding", "attention", "feed_forward", "block", "model", "head"]


@pytest.fixture
def diff(done, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return partial(done, "diff")


def source_lines(component):
    source = textwrap.dedent(inspect.getsource(component))
    return [line for line in source.splitlines() if line.strip()]


def squeezed(text):
    """Without spaces and line numbers, so that a folded line is whole."""
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
            for line in source_lines(component):
                assert line in out, line


@pytest.mark.parametrize("width", [40, 119])
def test_narrow_is_stacked_and_nothing_is_lost(diff, width):
    out, _ = diff("attention", "--width", width)
    assert max(map(len, out.splitlines())) <= width
    found = squeezed(out)
    left = found.index("classMultiHeadedAttention(nn.Module)")
    right = found.index("classCausalSelfAttention(nn.Module)")
    assert "self.linears[-1](x)" in found[left:right]  # all of the left first
    for component in (annotated.attention, mingpt_style.CausalSelfAttention):
        for line in source_lines(component):
            assert re.sub(r"\s", "", line) in found, line


@pytest.mark.parametrize("width", [120, 200])
def test_wide_is_two_columns(diff, width):
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


def test_without_a_concept_all_are_shown(diff):
    out, _ = diff("--width=170")
    titles = [f"{name}  {concept.does}" for name, concept in KNOWN.items()]
    assert list(KNOWN) == CONCEPTS
    assert [line for line in out.splitlines() if line in titles] == titles


def test_line_numbers_are_the_files_own(diff):
    out, _ = diff("feed_forward", "--width=170")
    lines, first = inspect.getsourcelines(mingpt_style.MLP)
    assert f"mingpt_style/feed_forward.py:{first}" in out
    for number, line in enumerate(lines, start=first):
        if line.strip():
            assert re.search(rf"\b{number} {re.escape(line.rstrip())}", out)


@pytest.mark.parametrize(("height", "is_long"), [(300, False), (30, True)])
def test_in_a_terminal_what_is_long_is_paged(monkeypatch, height, is_long):
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
    assert "\x1b[" in shown  # colours


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_accident():
    done = subprocess.run(
        f"{sys.executable} -m shared.cli diff | head -1; "
        "exit ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["no concept 'nonsense'", *CONCEPTS]),
        (["--width", "39"], ["width", "at least 40", "39"]),
        (["--width", "-1"], ["width", "-1"]),
    ],
)
def test_a_mistake_ends_in_one_line(refused, arguments, words):
    message = refused("diff", *arguments)
    assert all(word in message for word in words), message


def test_a_third_style():
    sources = pair_sources(annotated, third_style)
    console = Console(file=StringIO(), width=200)
    show_sources(console, ("annotated", "third_style"), sources)
    out = console.file.getvalue()
    # paired by what they are in the model, not by their place in a list
    for left, right in (
        ("class MultiHeadedAttention", "class Heads"),
        ("class DecoderLayer", "class Layer"),
    ):
        assert any(left in s and right in s for s in out.splitlines())
    assert "third_style.py:" in out
    # a concept of its own is shown too
    assert list(sources) == [*CONCEPTS, "weights"]
    assert "no counterpart" in out


def test_components_meet_by_their_role():
    before = torch.get_rng_state()
    pairs = pair_sources(annotated, mingpt_style)
    assert torch.equal(before, torch.get_rng_state())
    names = {
        concept: [
            tuple(part.name if part else None for part in (p.left, p.right))
            for p in found
        ]
        for concept, found in pairs.items()
    }
    assert ("DecoderLayer", "Block") in names["block"]
    assert ("DecoderModel", "GPT") in names["model"]
    assert names["attention"] == [
        ("MultiHeadedAttention", "CausalSelfAttention"),
        ("attention", None),
    ]


def test_source_that_cannot_be_found_is_named():
    with pytest.raises(ValueError, match="no source of int"):
        read_part(int)
