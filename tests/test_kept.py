"""Results that gpt-duet check keeps: for the same files, and no others."""

import glob
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest
from strategies import one_in
from test_project import MODEL

from gpt_duet.cli import kept
from gpt_duet.cli.job import Job
from gpt_duet.invariants.report import CheckResult, Report

pytestmark = pytest.mark.unhooked  # the hook imports, and writes files
PASSED = CheckResult("check_shape", "passed", "7 sizes", 0.1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "weights.txt").write_text("0.5")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "early.py").write_text("")
    (tmp_path / "late.py").write_text("")
    (tmp_path / "latest").symlink_to("early.py")
    early = SimpleNamespace(__file__=str(tmp_path / "early.py"))
    monkeypatch.setitem(sys.modules, "imported_before", early)
    monkeypatch.setattr(kept, "START", 2e9)  # long after the file was written
    for name in ("OTHER", "MODEL", "OMP_PROC_BIND"):
        monkeypatch.setenv(name, "")  # so that it goes at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIZE", "3")
    return tmp_path


def entry(seed=1, file=None, **settings):
    job = Job("m:build", None, {"seed": seed} | settings, file)
    return kept.entry_of(job)


def run(build, result=PASSED, **facts):
    """Watch what builds a model, and keep its report; whether it was."""
    report = Report("m:build", 11, 8, [result.name], [result], **facts)
    kept.run(entry(), lambda: (build(), report)[1])
    return kept.find(entry()) is not None


def read():
    with suppress(FileNotFoundError), open("weights.txt") as file:
        return file.read()


def compiled(name):
    with suppress(FileNotFoundError):
        Path(cache_from_source(name)).read_bytes()


def write(name, text):
    def change():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)

    return change


def linked(name):
    def change():
        Path("latest").unlink()
        Path("latest").symlink_to(name)

    return change


@pytest.mark.parametrize(
    ("build", "change"),
    one_in(
        3,
        [
            (read, write("weights.txt", "0.25")),
            (read, lambda: os.remove("weights.txt")),
            (lambda: Path("config.json").exists(), write("config.json", "{}")),
            (lambda: os.environ.get("SIZE"), lambda: os.environ.pop("SIZE")),
            (lambda: os.getenv("MODEL"), lambda: os.environ.update(MODEL="a")),
            (lambda: Path("latest").resolve(), linked("late.py")),
            # what was imported before, or as it was compiled
            (read, write("early.py", "SIZE = 3")),
            (lambda: compiled("late.py"), write("late.py", "SIZE = 3")),
            # a module that an import would find first, or at all
            (read, write("flash_attention.py", "")),
            (read, write("flash_attention/__init__.py", "")),
            (read, lambda: os.environ.update(OMP_PROC_BIND="true")),
        ],
    ),
)
def test_a_result_is_that_of_all_that_was_read(here, build, change):
    assert run(build)
    assert kept.find(entry(seed=2)) is None
    write("notes.txt", "no part of it")()
    os.environ["OTHER"] = "no part of it"
    report = kept.find(entry())
    assert report is not None
    assert report.results == [PASSED]
    assert "kept from an earlier run of the same files (20" in str(report)
    assert "--fresh runs anew" in str(report)
    change()
    assert kept.find(entry()) is None
    assert run(build)
    assert (here / kept.FOLDER / ".gitignore").read_text() == "*\n"


def started():
    subprocess.run([sys.executable, "-c", ""], check=True)


def connected():
    with socket.socket() as one:
        one.connect_ex(("127.0.0.1", 9))


def native(name="safetensors._safetensors_rust"):
    sys.audit("import", name, "/x.so", [], [], [])


@pytest.mark.parametrize(
    "build",
    one_in(
        3,
        [
            lambda: os.listdir("."),
            lambda: glob.glob("*.safetensors"),
            lambda: [*Path().iterdir()],
            lambda: write("log.txt", "a line")(),
            lambda: os.open("weights.txt", os.O_RDWR),
            lambda: os.system("true"),
            started,
            connected,
            native,
        ],
    ),
)
def test_a_model_whose_files_are_not_all_known_is_not_kept(here, build):
    assert run(read)
    assert not run(build)  # nor is the older result, which was another's
    assert run(lambda: native("numpy.random.mtrand"))
    assert not run(read, replace(PASSED, message="no time for all of it"))
    assert type(os.environ) is not kept._Environment


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"status": "failed"}, {}),
        ({"status": "error"}, {}),
        ({"status": "expected"}, {}),
        ({"not_tried": "larger weights"}, {}),
        ({"proof": {"left_out": ["in float16"]}}, {}),
        ({"status": "skipped", "message": "no time: 3 s for all"}, {}),
        ({}, {"interrupted": True}),
    ],
)
def test_a_result_that_is_bad_or_not_whole_is_not_kept(here, change, facts):
    assert not run(read, replace(PASSED, **change), **facts)
    assert run(read)


def test_a_file_that_changes_meanwhile_may_be_another(here, monkeypatch):
    monkeypatch.setattr(kept, "START", 0.0)
    assert not run(read)


def test_neither_maps_nor_accelerators_nor_ranks_are_kept(monkeypatch):
    assert entry(device="cpu") is not None
    assert entry(file=Path("m.png")) is None
    assert entry(device="cuda") is None
    entries = {entry()}
    for name in ("version", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name), "other"])
        entries.add(entry())
    assert len(entries) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert entry() is None


@pytest.mark.slow
def test_fresh_runs_anew_what_is_kept(here, monkeypatch, duet):
    monkeypatch.setattr("gpt_duet.cli.check.entry_of", kept.entry_of)
    write("tiny.py", MODEL)()

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
    """Run the command; its status, models, and whether it imported torch."""
    run = "import sys; from gpt_duet.cli import main\ntry: main()\nfinally: "
    run += "print('torch' in sys.modules, file=sys.stderr)"
    words = ("check", "--json=out.json", *words)
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", run, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    models = json.loads((folder / "out.json").read_text())["models"]
    return done, models, done.stderr.splitlines()[-1] == "True"


@pytest.mark.slow
def test_a_changed_line_runs_one_target_of_three_anew(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.gpt-duet]\nonly = ['shape', 'causality']\n"
        "[tool.gpt-duet.targets]\n"
        "'one.py:Tiny' = {}\n'two:Tiny' = {}\n'three:Tiny' = {block-size = 4}"
    )
    _, first, torch = check(tmp_path)
    assert ([m["kept"] for m in first], torch) == (["", "", ""], True)
    done, again, torch = check(tmp_path)
    assert (done.returncode, torch) == (0, False)
    assert all([m.pop("kept") for m in again])
    for model in first:
        del model["kept"]
    assert again == first
    assert done.stdout.count("kept from an earlier run of the same") == 3
    source = MODEL.replace("x.cumsum(1)", "x.sum(1, keepdim=True) + x")
    (tmp_path / "two.py").write_text(source)
    for _ in range(2):  # what fails is never kept
        done, models, _ = check(tmp_path, "-q")
        assert [bool(m["kept"]) for m in models] == [True, False, True]
        assert [m["ok"] for m in models] == [True, False, True]
        assert done.returncode == 1
