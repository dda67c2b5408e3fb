"""The table [tool.gpt-duet] of pyproject.toml, and pytest --gpt-duet."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from scorers import FILE

from gpt_duet import Target, parametrize_with_checks
from gpt_duet.cli.job import read_project
from gpt_duet.invariants.runner import choose_checks

MODEL = """
import torch
from torch import nn

class Tiny(nn.Module):
    vocab_size, block_size = 11, 9
    def __init__(self, flip=False):
        super().__init__()
        self.flip = flip
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
    def forward(self, idx, *, shift=None):
        x = self.table(idx)
        x = x if shift is None else x + shift.sum()
        return self.head(x.flip(1) if self.flip else x.cumsum(1))

def leaky():
    return Tiny(flip=True)

def make_shift(tokens):
    return torch.ones(3)
"""
SETTINGS = """
[tool.gpt-duet]
only = ["shape", "causality"]
block-size = 6
[tool.gpt-duet.targets."tiny.py:Tiny"]
[tool.gpt-duet.targets."tiny:leaky"]
expect = {causality = "an encoder"}
"""
# --check-shapes does not reach the other processes that these tests start
pytestmark = pytest.mark.unhooked


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def pytest_here(project, monkeypatch, capsys):
    """Return a function that runs pytest in the project, in this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # faulthandler would also change the process that runs these tests
    plugins = ("cacheprovider", "faulthandler")
    words = [f"-pno:{name}" for name in plugins]

    def run(*others):
        capsys.readouterr()
        status = pytest.main(["-pgpt_duet.pytest_plugin", *words, *others])
        return status, "".join(capsys.readouterr())

    return run


def pytest_in(folder, *words):
    """Run pytest in another process, with the kit's plugin and no other."""
    plugins = ("-p", "gpt_duet.pytest_plugin", "-p", "no:cacheprovider")
    run = [sys.executable, "-m", "pytest", *plugins, *words]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        run, cwd=folder, env=alone, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_runs_all_targets_with_their_settings(project, duet):
    status, out, err = duet("check")
    assert status == 0, err
    assert "tiny.py:Tiny: 11 tokens, sequences to 6\n" in out
    assert "1 passed, 1 expected" in out
    # an option on the command line replaces that of the file
    status, out, _ = duet(
        "check", "tiny:leaky", "--only=causality", "--expect=shape=none"
    )
    assert status == 1
    assert "tiny:leaky: 11 tokens, sequences to 6\n" in out
    assert "1 failed" in out


def test_the_settings_are_found_in_a_parent_folder(
    project, duet, monkeypatch, tmp_path
):
    """The folder tests/ has its own pyproject.toml, which lacks the table."""
    (project / "tests" / "deep").mkdir(parents=True)
    (project / "tests" / "pyproject.toml").write_text("[tool.other]\n")
    monkeypatch.chdir(project / "tests" / "deep")
    words = ("--only", "shape", "--json", "out.json", "--map", "map.html")
    status, out, err = duet("check", *words)
    assert status == 0, err
    assert "tiny.py:Tiny: 11 tokens, sequences to 6\n" in out
    assert Path.cwd() == project / "tests" / "deep"
    found = sorted(path.name for path in Path.cwd().iterdir())
    maps = ["map-tiny-leaky.html", "map-tiny-py-Tiny.html"]
    assert found == [*maps, "out.json"]
    # a target on the command line is relative to the current folder
    status, _, err = duet("check", "tiny.py:Tiny", "--only", "shape")
    assert (status, "tiny.py" in err) == (2, True)


def test_pytest_finds_the_settings_in_a_parent_folder(
    project, pytest_here, monkeypatch
):
    (project / "tests").mkdir()
    monkeypatch.chdir(project / "tests")
    status, out = pytest_here("--gpt-duet", "-q")
    assert (status, "3 passed, 1 xfailed" in out) == (0, True), out
    assert Path.cwd() == project / "tests"


@pytest.mark.slow
def test_arguments_are_made_as_the_settings_say(project, duet, pytest_here):
    own = '[tool.gpt-duet.targets."tiny.py:Tiny"]\nonly = ["causality"]\n'
    for text, said in (
        ("", "never given: shift"),
        ('input = {shift = "tiny:make_shift"}', "with shift"),
    ):
        (project / "pyproject.toml").write_text(own + text)
        status, out, err = duet("check")
        assert (status, said in " ".join(out.split())) == (0, True), out + err
    status, out = pytest_here("--gpt-duet", "-q")
    assert (status, "1 passed" in out) == (0, True), out
    (project / "pyproject.toml").write_text(own + 'documents = "no:thing"')
    status, _, err = duet("check")
    assert (status, "no module 'no'" in err) == (2, True), err
    status, out = pytest_here("--gpt-duet", "-q")
    assert status == 1


@pytest.mark.slow
def test_a_scorer_is_one_more_target(project, duet, pytest_here):
    (project / "perplexity.py").write_text(FILE)
    file, sizes = project / "pyproject.toml", "vocab-size = 11\nbos = 5\n"
    text = f"[tool.gpt-duet]\nscorer = 'perplexity:peek'\n{sizes}"
    file.write_text(f"{text}targets.'tiny:Tiny' = {{only = ['shape']}}\n")
    assert read_project(project) == {
        "perplexity:peek": {
            "scorer": "perplexity:peek",
            "vocab-size": 11,
            "bos": 5,
        },
        "tiny:Tiny": {"vocab-size": 11, "only": ["shape"]},
    }
    status, out, err = duet("check", "--block-size=8")
    assert status == 1, err
    assert "perplexity:peek: 11 tokens, sequences to 8\n" in out
    assert "tiny:Tiny: 11 tokens, sequences to 8\n" in out
    assert "scorer_normalised  failed" in out
    file.write_text(f"{text}block-size = 8")
    status, out = pytest_here("--gpt-duet", "-q", "-rA")
    assert status == 1, out
    assert "FAILED perplexity:peek - " in out
    assert "scorer_normalised: " in out
    assert "Traceback" not in out
    own = "{scorer = 'perplexity:make', vocab-size = 11}"
    file.write_text(f"[tool.gpt-duet]\ntargets.'bits per byte' = {own}")
    status, out, err = duet("check")
    assert (status, err) == (0, "")
    assert "bits per byte: 11 tokens, sequences to 64\n" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targets.'a:b'.scorer = 'a:b'", "a:b: --scorer requires --vocab"),
        ("targets.'a:b'.bos = 3", "a:b: --bos requires --scorer"),
        (
            "targets.bits = {scorer = 'a:b', layout = 'bt', vocab-size = 9}",
            "bits: --scorer takes no --layout",
        ),
        ("blok-size = 3", "no setting 'blok-size': did you mean block-size"),
        ("json = 'out'", "has no setting 'json'"),
        ("block-size = true", "Invalid value for '--block-size'"),
        ("compile = 'maybe'", "Invalid value for '--compile'"),
        ("block-size = 0", "--block-size must be at least 1, got 0"),
        ("layout = 'tp'", "tiny:Tiny: Invalid value for '--layout'"),
        ("only = 'shap'", "unknown check check_shap"),
        ("targets = ['a:b']", "targets must be a table, as [tool.gpt-"),
        ("targets.'a:b' = ['c']", "toml: a:b must be a table, as [tool.gpt"),
        ("[tool", "pyproject.toml is not valid TOML"),
        ("tool = 3", "pyproject.toml: tool must be a table, as [tool."),
        ("tool.gpt-duet = 3", "pyproject.toml: gpt-duet must be a table, as"),
        ("tool.gpt-duet = [{}]", "gpt-duet must be a table, as [tool.gpt"),
        ("targets.a = {scorer = '', vocab-size = 9}", "a: scorer is empty"),
        ("cache = ''", "[tool.gpt-duet] tiny:Tiny: cache is empty"),
        ("tool.gpt-duet.targets.'' = {}", "cannot find a model in '': write"),
    ],
)
def test_a_wrong_setting_is_one_sentence(project, refused, text, message):
    head = "[tool.gpt-duet]\ntargets.'tiny:Tiny'.seed = 1\n"
    head = "[tool.gpt-duet]\n" if "targets = " in text else head
    head = "" if text.startswith("tool") else head
    (project / "pyproject.toml").write_text(f"{head}{text}\n")
    assert message in refused("check")


def test_pytest_has_an_item_for_each_check(pytest_here):
    status, out = pytest_here("--gpt-duet", "-rA", "-q")
    assert status == 0, out
    assert "3 passed, 1 xfailed" in out
    assert "PASSED tiny.py:Tiny::check_causality" in out
    assert "XFAIL tiny:leaky::check_causality - an encoder" in out
    words = ("--gpt-duet", "tiny.py:leaky", "-k", "causality", "-q")
    status, out = pytest_here(*words)
    assert status == 1
    assert f"1 failed, {len(choose_checks(None)) - 1} deselected" in out
    assert "position 0 sees token 1" in out
    assert "pytest_plugin.py" not in out
    status, out = pytest_here("--gpt-duet", "tiny.py")
    assert (status, "name its factory" in out) == (4, True)


@pytest.mark.slow
def test_the_plugin_works_next_to_others(project):
    words = ("-p", "xdist", "-p", "pytest_cov", "-n2", "--cov=tiny")
    status, out = pytest_in(project, "--gpt-duet", "-q", *words)
    assert status == 0, out
    assert "3 passed, 1 xfailed" in out
    (row,) = [row for row in out.splitlines() if row.startswith("tiny.py")]
    assert int(row.split()[-1].rstrip("%")) > 80, out


def test_the_plugin_imports_nothing_until_it_is_used(project):
    (project / "test_none.py").write_text(
        "import sys\ndef test():\n    assert 'torch' not in sys.modules\n"
    )
    assert pytest_in(project, "-q")[0] == 0


def build(flip=False):
    raise AssertionError("nothing is built while tests are collected")


@pytest.mark.slow
def test_the_action_checks_what_its_inputs_name(project):
    root = Path(__file__).parents[2]
    action = yaml.safe_load((root / "action.yml").read_text("utf-8"))
    step = action["runs"]["steps"][-1]
    folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([folder, os.environ["PATH"]])

    def run(**inputs):
        given = {
            name: row["default"] for name, row in action["inputs"].items()
        }
        given |= inputs
        env = os.environ | {"PATH": path}
        for name, text in step["env"].items():
            env[name] = re.sub(
                r"\$\{\{ inputs\.(\w+) \}\}", lambda m: given[m[1]], text
            )
        run = ["bash", "-eo", "pipefail", "-c", step["run"]]
        return subprocess.run(run, cwd=project, env=env, capture_output=True)

    done = run()
    assert (done.returncode, b"::error" in done.stdout) == (0, False), done
    targets = "tiny.py:Tiny\ntiny.py:Tiny(flip = True)\n"
    done = run(targets=targets, options="--only causality", sarif="a.sarif")
    assert done.returncode == 1, done
    found = json.loads((project / "a.sarif").read_text())["runs"][0]["results"]
    assert [row["ruleId"] for row in found] == ["check_causality"]


def test_models_with_different_settings_are_collected_quickly():
    def test(model, check):
        pass

    one = Target(build, block_size=4, checks=["shape"])
    other = Target(build, expected={"cache": "none yet"}, budget=3.0)
    before = time.perf_counter()
    models = [one, other, build, build, build]
    mark = parametrize_with_checks(models, vocab_size=5)(test).pytestmark[0]
    assert time.perf_counter() - before < 1
    rows = mark.args[1]
    names = choose_checks(None)
    assert [row.id for row in rows[:2]] == [
        "build-check_shape",
        f"build#2-{names[0]}",
    ]
    assert len(rows) == 1 + 4 * len(names)
    marked = [row.id for row in rows if row.marks]
    assert marked == ["build#2-check_cache"]
    with pytest.raises(TypeError, match="blok_size"):
        Target(build, blok_size=4)


def test_a_target_is_checked_with_its_settings(project):
    from gpt_duet.targets import load_target

    def test(model, check):
        pass

    tiny = load_target("tiny.py:Tiny")
    models = [Target(tiny, block_size=4), Target(tiny, block_size=7)]
    mark = parametrize_with_checks(models, checks=["shape"])(test)
    found = [
        row.values[1](row.values[0]) for row in mark.pytestmark[0].args[1]
    ]
    assert "the longest of 4" in found[0]
    assert "the longest of 7" in found[1]
