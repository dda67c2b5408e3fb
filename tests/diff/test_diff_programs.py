"""Compare one GPT in C, Python and JavaScript, with and without a fault."""

import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gpt_duet import check_model, mingpt_style
from gpt_duet.checkpoint import TINY_MODEL, load_checkpoint
from gpt_duet.cli.diffing import diff_values
from gpt_duet.targets import load_target

PORTS = Path(__file__).resolve().parents[2] / "docs" / "ports"
WEIGHTS = TINY_MODEL / "model.bin"
# each fault, with its number in the C code and the first array that differs
FAULTS = {
    "mask": (1, "layer 0 attended"),
    "scale": (2, "layer 0 attended"),
    "heads": (3, "layer 0 attended"),
    "position": (4, "embed"),
    "eps": (5, "layer 0 ln 1"),
}
LANGUAGES = ("c", "python", "javascript")


@pytest.fixture
def port(tmp_path, monkeypatch):
    """Return a function that builds a port, with or without a fault."""

    def target(language, fault=""):
        weights = shlex.quote(str(WEIGHTS))
        if language == "c":
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                pytest.skip("no compiler of C here")
            number = FAULTS[fault][0] if fault else 0
            program = tmp_path / "my_gpt"
            source = [PORTS / "my_gpt.c", "-o", program, "-lm"]
            subprocess.run(
                [compiler, "-O2", f"-DFAULT={number}", *map(str, source)],
                check=True,
            )
            return f"exec:{shlex.quote(str(program))} {weights}"
        if language == "python":
            monkeypatch.setenv("FAULT", fault)
            return f"exec:{sys.executable} {PORTS / 'my_gpt.py'} {weights}"
        if shutil.which("node") is None:
            pytest.skip("no node here")
        return f"exec:node {PORTS / 'my_gpt.js'} {weights} {fault}"

    return target


def test_a_port_in_c_has_the_scores_of_a_style(port):
    program, found = load_target(port("c")), load_checkpoint(TINY_MODEL)
    state = found.to(torch.device("cpu"), torch.float32)
    model = mingpt_style.from_gpt2(state, found.config).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])
    expected = model(ids)[0][0].detach()
    assert torch.allclose(torch.tensor(program(ids[0])), expected, 0, 1e-4)
    arrays = program.dump(ids[0])
    assert torch.allclose(torch.tensor(arrays["logits"]), expected, 0, 1e-4)
    assert [*arrays][:3] == ["embed", "layer 0 ln 1", "layer 0 qkv"]
    program.reset()
    parts = [program.feed(part) for part in ids[0].split([5, 1, 10])]
    found = torch.cat([*map(torch.tensor, parts)])
    assert torch.allclose(found, expected, 0, 1e-4)
    program.end()


def test_the_page_shows_the_lines_of_the_port():
    page = (PORTS.parent / "how-to" / "any_language.md").read_text("utf-8")
    code = page.split("```c\n")[1].split("```")[0]
    source = (PORTS / "my_gpt.c").read_text("utf-8")
    assert textwrap.indent(code, "    ") in source


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_sound_port_passes_and_is_one_function(port, language):
    target = port(language)
    report = check_model(load_target(target))
    assert report.ok, str(report)
    passed = {r.name for r in report.results if r.status == "passed"}
    assert passed > {"check_causality", "check_cache", "check_length_limit"}
    for style in ("annotated", "mingpt_style"):
        found = diff_values([style, target], None, vocab_size=None)
        assert found.same, found.sentence
        (_, _), (alone, count) = found.counts
        assert count - alone >= 28  # so many arrays, or more, match


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_first_array_that_a_fault_changes_is_named(port, language, fault):
    target = port(language, fault)
    found = diff_values(["annotated", target], None, vocab_size=None)
    assert not found.same
    assert found.parted.right.function == FAULTS[fault][1]
    if fault == "mask":
        program = load_target(target)
        report = check_model(program, checks=["causality"])
        assert report.failed == ["check_causality"]


@pytest.mark.slow
def test_four_digits_are_equal_and_hide_no_fault(port, tmp_path):
    for fault in ("", "scale"):
        target = port("c", fault)
        source = (PORTS / "my_gpt.c").read_text("utf-8")
        (tmp_path / "my_gpt.c").write_text(source.replace("%.9g", "%.4f"))
        number = FAULTS[fault][0] if fault else 0
        command = f"cc -O2 -DFAULT={number} my_gpt.c -o my_gpt -lm"
        subprocess.run(command.split(), cwd=tmp_path, check=True)
        found = diff_values(["annotated", target], None, vocab_size=None)
        assert found.same == (not fault), found.sentence
        assert any("in steps of 0.0001" in note for note in found.notes)


@pytest.mark.slow
def test_bytes_and_text_are_the_same_scores(port):
    target = port("c")
    text, binary = load_target(target), load_target(f"{target} --binary")
    assert binary.dumps
    names = [["annotated", f"{target} --binary"], [target, target]]
    for both in names:
        assert diff_values(both, None, vocab_size=None).same
    assert text.vocab_size == binary.vocab_size == 65
    assert os.path.getsize(WEIGHTS) < 100_000
