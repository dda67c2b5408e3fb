"""gpt-duet check reuses results for equal sources, weights and settings."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_project import MODEL

from gpt_duet.cli import kept
from gpt_duet.cli.job import Job
from gpt_duet.invariants.report import CheckResult, Report
from gpt_duet.targets import load_target

pytestmark = pytest.mark.unhooked  # --check-shapes writes files
PASSED = CheckResult("check_shape", "passed", "7 sizes", 0.1)
HELPER = "SCALE = 1.0\n"
SOURCE = f"from helper import SCALE\n{MODEL}"


class Alias(ModuleType):
    """A module that raises for each attribute, as lazy aliases may."""

    def __getattr__(self, name):
        raise ModuleNotFoundError(f"no module for {name}")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "old_name", Alias("old_name"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "tiny.py").write_text(SOURCE)
    (tmp_path / "weights.txt").write_text("0.5")
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    return tmp_path


def entry(target="tiny.py:Tiny", seed=1, file=None, **settings):
    kept.imported_files.clear()
    job = Job(target, None, {"seed": seed} | settings, file)
    return kept.entry_of(job, load_target(target))


def was_kept(result=PASSED, **facts):
    """Store a report, and return whether the next run finds it."""
    report = Report("tiny.py:Tiny", 11, 8, [result.name], [result], **facts)
    entry().keep(report)
    return entry().find() is not None


def rewrite(name, text):
    return lambda: Path(name).write_text(text)


def test_a_result_is_found_if_nothing_has_changed(here):
    assert was_kept()
    assert entry().find().results == [PASSED]
    assert (here / kept.FOLDER / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize(
    "change",
    [
        rewrite("tiny.py", SOURCE.replace("cumsum", "cumprod")),
        rewrite("helper.py", "SCALE = 2.0\n"),
        rewrite("helper.py", "from other import SCALE\n"),
        lambda: os.environ.update(OMP_PROC_BIND="true"),
    ],
)
def test_a_changed_source_or_variable_makes_a_result_old(
    here, monkeypatch, change
):
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    (here / "other.py").write_text("SCALE = 3.0\n")
    assert was_kept()
    change()
    assert entry().find() is None


@pytest.mark.parametrize(
    "state",
    [
        "self.head.weight.data.add_(float(text))",
        "self.scale = float(text)",
        "self.scales = [1, (float(text),)]",
        "self.held = torch.full((3,), float(text))",
        "self.array = np.full(3, float(text))",
        "self.config = type('Config', (), {})(); self.config.a = text",
        "self.register_buffer('b', torch.tensor(float(text)), False)",
    ],
)
def test_another_state_of_the_built_model_makes_a_result_old(here, state):
    read = "Path('weights.txt').read_text()"
    source = SOURCE.replace(
        "self.flip = flip", f"self.flip, text = flip, {read}"
    ).replace("8, 11)\n", f"8, 11)\n        {state}\n", 1)
    (here / "tiny.py").write_text(
        f"from pathlib import Path\nimport numpy as np\n{source}"
    )
    assert was_kept()
    (here / "weights.txt").write_text("0.25")
    assert entry().find() is None


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"status": "failed"}, {}),
        ({"status": "error"}, {}),
        ({"status": "expected"}, {}),
        ({"not_tried": "no time for rows"}, {}),
        ({"proof": {"left_out": ["in train mode"]}}, {}),
        ({}, {"interrupted": True}),
    ],
)
def test_a_failed_or_partial_result_is_not_kept(here, change, facts):
    result = CheckResult(**{**vars(PASSED), **change})
    assert not was_kept(result, **facts)


def test_a_failed_run_removes_the_old_result(here):
    assert was_kept()
    assert not was_kept(CheckResult("check_shape", "failed", "7", 0.1))


def test_results_with_maps_devices_or_processes_are_not_kept(
    here, monkeypatch
):
    assert entry() is not None
    assert entry(file=Path("map.png")) is None
    assert entry(device="cuda") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert entry() is None


def test_a_model_that_cannot_be_built_has_no_entry(here):
    (here / "tiny.py").write_text("def build():\n    raise KeyError('no')\n")
    assert entry("tiny.py:build") is None


@pytest.mark.slow
def test_fresh_ignores_kept_results(here, monkeypatch, duet):
    monkeypatch.setattr("gpt_duet.cli.checking.entry_of", kept.entry_of)

    def run(*words):
        status, out, err = duet(
            "check", "tiny.py:Tiny", "--only=shape", *words
        )
        assert (status, err) == (0, "")
        return "kept from an earlier run" in out

    assert not run()
    assert run()
    assert not run("--fresh")
    assert run("--format=github")
    assert not run("-q")
    assert not run("--block-size=5")
    summary = here / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert run("--format=github", "--json=out.json")
    assert "tiny.py:Tiny (kept from an earlier run) | 1 |" in (
        summary.read_text()
    )
    (model,) = json.loads((here / "out.json").read_text())["models"]
    assert model["kept"].startswith("20")


def check(folder, *words):
    """Run the command; return the process, and the models in its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "gpt_duet", "check", "--json=out.json", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    return done, json.loads((folder / "out.json").read_text())["models"]


@pytest.mark.slow
def test_a_changed_line_reruns_one_target_of_three(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.gpt-duet]\nonly = ['shape', 'causality']\n"
        "[tool.gpt-duet.targets]\n"
        "'one.py:Tiny' = {}\n'two:Tiny' = {}\n'three:Tiny' = {block-size = 4}"
    )
    _, first = check(tmp_path)
    assert [m["kept"] for m in first] == ["", "", ""]
    done, again = check(tmp_path)
    assert done.returncode == 0
    assert all([m.pop("kept") for m in again])
    for model in first:
        del model["kept"]
    assert again == first
    assert done.stdout.count("kept from an earlier run of the same") == 3
    source = MODEL.replace("x.cumsum(1)", "x.sum(1, keepdim=True) + x")
    (tmp_path / "two.py").write_text(source)
    for _ in range(2):  # a failure is never stored
        done, models = check(tmp_path, "-q")
        assert [bool(m["kept"]) for m in models] == [True, False, True]
        assert [m["ok"] for m in models] == [True, False, True]
        assert done.returncode == 1
