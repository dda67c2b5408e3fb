"""The wheel: built, installed into a fresh environment, and used there."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

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
def place(tmp_path_factory):
    """A new environment: the wheel, and the dependencies of this one."""
    build = tmp_path_factory.mktemp("build")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            build / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for file in FILES:
        shutil.copy(ROOT / file, build)
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index",
        "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=build,
    )  # fmt: skip
    (wheel,) = (build / "dist").iterdir()
    folder = tmp_path_factory.mktemp("user")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    run(
        sys.executable, "-m", "pip", "--python", folder / "env", "install",
        "--no-deps", "--no-index", wheel, cwd=folder,
    )  # fmt: skip
    # only now: pip is not to see the checkout among what is installed
    base = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    paths = sysconfig.get_paths("venv", vars=base)
    pth = Path(paths["purelib"]) / "dependencies.pth"
    pth.write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder, Path(paths["scripts"]), Path(paths["purelib"])


def test_all_packages_and_their_files_are_in_the_wheel(place):
    folder, scripts, installed = place
    for package in PACKAGES:
        assert (installed / package / "py.typed").is_file()
        for path in (ROOT / package).rglob("*"):
            inside = path.relative_to(ROOT)
            left_out = path.suffix in (".pyc", ".md") or path.is_dir()
            if package == "benchmarks" or "pictures" in inside.parts:
                continue
            assert left_out or (installed / inside).is_file(), inside
    names = (*PACKAGES, "gpt_duet")
    code = f"import {', '.join(names)}; print(*[{', '.join(names)}])"
    out = run(scripts / "python", "-c", code, cwd=folder)
    assert out.count(str(installed)) == len(names), out


def test_the_command_checks_and_compares(place):
    folder, scripts, _ = place
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
