"""The wheel: built, installed into a fresh environment, and used there."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("annotated", "mingpt_style", "shared", "benchmarks")
FILES = ("gpt_duet.py", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


def run(*command, cwd):
    """Run a command as from a shell elsewhere, and return what it printed."""
    hidden = ("PYTHONPATH", "COVERAGE_PROCESS_CONFIG")
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k not in hidden},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for file in FILES:
        shutil.copy(ROOT / file, folder)
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index",
        "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=folder,
    )  # fmt: skip
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory):
    """A new environment: the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("user")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    base = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    paths = sysconfig.get_paths("venv", vars=base)
    run(
        sys.executable, "-m", "pip", "--python", folder / "env", "install",
        "--no-deps", "--no-index", wheel, cwd=folder,
    )  # fmt: skip
    # only now: pip is not to see the checkout among what is installed
    dependencies = Path(torch.__file__).parents[1]
    pth = Path(paths["purelib"]) / "dependencies.pth"
    pth.write_text(f"{dependencies}\n")
    return folder, Path(paths["scripts"])


def test_all_files_of_the_packages_are_in_the_wheel(wheel):
    names = set(ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES[:3]
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and path.suffix not in (".pyc", ".md")
        and "pictures" not in path.relative_to(ROOT).parts
    }
    assert expected <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_every_package_is_imported_from_the_wheel(place):
    folder, scripts = place
    code = "import {0}; print({0}.__file__)"
    for package in (*PACKAGES, "gpt_duet"):
        command = scripts / "python", "-c", code.format(package)
        path = Path(run(*command, cwd=folder).strip())
        assert path.is_relative_to(folder / "env"), path


def test_the_command_checks_and_compares(place):
    folder, scripts = place
    out = run(
        scripts / "gpt-duet", "check", "mingpt_style", "annotated",
        "--only", "check_causality", "--only", "check_shape", cwd=folder,
    )  # fmt: skip
    assert out.count("check_causality") == 2
    assert "failed" not in out.replace("0 failed", "")
    out = run(
        scripts / "gpt-duet", "compare", "--html", "page.html", cwd=folder
    )
    assert "one function" in out
    assert "</html>" in (folder / "page.html").read_text(encoding="utf-8")
