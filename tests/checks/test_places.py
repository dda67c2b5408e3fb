"""The source lines in the message of a failure are also in its data."""

import re
from pathlib import Path

import pytest
import torch
from broken_models import BROKEN
from small_gpt import GPT
from torch import nn

from gpt_duet import check_model
from gpt_duet.cli.formats import faults
from gpt_duet.console import MistakeAt
from gpt_duet.importing import theirs_shown
from gpt_duet.processes import run_alone
from gpt_duet.running.errors import places_in
from gpt_duet.targets import load_target


class Wrong(nn.Module):
    """A model with one fault, which its argument names."""

    vocab_size, block_size = 17, 16

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.table, self.mix = nn.Embedding(17, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, idx):
        x = self.table(idx).cumsum(1)
        if self.fault == "leaks":
            x = x.flip(1)
        if self.fault == "raises" and idx.size(1) > 7:
            raise RuntimeError("too long for it")
        if self.fault == "overflows":
            x = self.mix(x).exp()
            x = x / x.sum(-1, keepdim=True)
        if self.fault == "detaches":
            x = x + x.detach().tanh()
        return self.head(x)


def line_of(text):
    lines = Path(__file__).read_text("utf-8").splitlines()
    return 1 + next(i for i, x in enumerate(lines) if text in x)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("check", "fault", "code"),
    [
        ("causality", "leaks", "x = x.flip(1)"),
        ("shape", "raises", 'RuntimeError("too long'),
        ("finite", "overflows", "x = self.mix(x)"),
        ("gradients", "detaches", "x = x + x.detach()"),
    ],
)
def test_a_failure_has_its_line_as_data(check, fault, code):
    report = check_model(lambda: Wrong(fault), checks=[check])
    (result,) = report.results
    assert result.status == "failed", result.message
    at = result.places[0]
    assert at["file"].endswith("test_places.py")
    assert at["line"] == line_of(code)
    # the facts for JSON do not depend on the message's wording
    model = report.to_dict() | {"model": "x"}
    model["results"][0]["message"] = "other words, elsewhere.py:3"
    (fault,) = faults([model])
    assert fault.line == at["line"]
    assert fault.file.endswith("tests/checks/test_places.py")


def test_a_passed_check_has_no_line():
    report = check_model(GPT, checks=["shape", "finite"])
    assert [result.places for result in report.results] == [[], []]


def test_a_line_that_does_not_parse_is_the_place(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("import torch\n\nx = (\n")
    monkeypatch.chdir(tmp_path)
    with theirs_shown(), pytest.raises(MistakeAt) as caught:
        load_target("half:build")
    assert caught.value.places[0] == {"file": "half.py", "line": 3}


def _raise(tell):
    raise MistakeAt("words", [{"file": "a.py", "line": 3}])


@pytest.mark.slow  # it starts a process that imports torch
def test_places_come_back_from_another_process():
    with pytest.raises(ValueError, match=r"^words$") as caught:
        run_alone(_raise, lambda told: None, "it", "gpt_duet.console")
    assert caught.value.places == [{"file": "a.py", "line": 3}]


def test_the_innermost_line_of_the_user_comes_first():
    def inner():
        torch.zeros(2) @ torch.zeros(3)

    def outer():
        inner()

    with pytest.raises(RuntimeError) as caught:
        outer()
    lines = [at["line"] for at in places_in(caught.value)]
    assert lines[:2] == [
        line_of("torch.zeros(2) @"), line_of("        inner()"),
    ]  # fmt: skip
    assert not re.search("torch/", str(places_in(caught.value)))


@pytest.mark.parametrize("name", ["cache_prepended", "cache_mask_missing"])
def test_a_cache_that_fails_has_the_line_that_its_message_names(name):
    (model,) = [model for model in BROKEN if model.name == name]
    (result,) = check_model(model.build, checks=["cache"]).results
    (place,) = result.places
    assert place["file"].endswith("zoo/small_gpt.py")
    assert f"small_gpt.py:{place['line']} " in result.message


HELPER = """
def turned(x):
    return x.flip(1)
"""


def test_the_line_is_the_users_even_in_a_helper():
    helper = {}
    file = "/env/site-packages/einops/_backends.py"
    exec(compile(HELPER, file, "exec"), helper)

    class Helped(Wrong):
        def forward(self, idx):
            x = helper["turned"](self.table(idx).cumsum(1))
            return self.head(x)

    report = check_model(lambda: Helped(""), checks=["causality"])
    (result,) = report.results
    assert result.places[0]["line"] == line_of('helper["turned"](self'), result
