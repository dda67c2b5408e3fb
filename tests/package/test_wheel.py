"""The kit installs as one package, next to folders with the kit's names."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from test_project import MODEL

import gpt_duet

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("annotated", "mingpt_style", "shared", "benchmarks")
FILES = (
    *("setup.py", "pyproject.toml", "README.md", "LICENSE", "gpt_duet.py"),
    "AGENTS.md",
)
# a user's project; its packages have the names of the kit's folders
THEIRS = ("shared", "annotated", "benchmarks", "tests")
BUILD = "from setuptools import build_meta as b; b.build_{}('dist')"
BOTH_WORK = {
    "kit": "from gpt_duet import GPTConfig, annotated, mingpt_style\n"
    "from gpt_duet.annotated.model import build_model\n"
    "from gpt_duet.benchmarks import app\n"
    "build_model(GPTConfig(9, 4, 1, 1, 8))",
    "theirs": "import mine\nassert mine.OWN == [*'sabt'], mine.OWN",
}

pytestmark = pytest.mark.slow


def run(*command, cwd, dependencies=False):
    """Run a command as if from a shell elsewhere, and return its output."""
    hidden = ("PYTHONPATH", "COVERAGE_PROCESS_CONFIG")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    if dependencies:  # packages of this environment, but not the checkout
        env["PYTHONPATH"] = str(Path(torch.__file__).parents[1])
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Environment:
    """A new virtual environment."""

    def __init__(self, folder):
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
        base = {"base": str(folder / "env"), "platbase": str(folder / "env")}
        paths = sysconfig.get_paths("venv", vars=base)
        self.scripts = Path(paths["scripts"])
        self.packages = Path(paths["purelib"])

    def pip(self, *words):
        python = self.scripts / "python"
        return run(
            sys.executable, "-m", "pip", "--python", python, *words,
            cwd=self.folder,
        )  # fmt: skip

    def install(self, wheel):
        before = {*self.packages.iterdir()}
        self.pip("install", "--no-deps", "--no-index", wheel)
        return {path.name for path in {*self.packages.iterdir()} - before}

    def duet(self, *words):
        command = self.scripts / "gpt-duet"
        return run(command, *words, cwd=self.folder, dependencies=True)

    def python(self, code, cwd=None):
        python = self.scripts / "python"
        place = cwd or self.folder
        return run(python, "-c", code, cwd=place, dependencies=True)


def build(folder, kind):
    """Build the wheel that `pip install` or `pip install -e` installs."""
    run(sys.executable, "-c", BUILD.format(kind), cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    copy = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=left_out)
    for file in FILES:
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def wheels(checkout):
    found = {}
    for kind in ("wheel", "editable"):
        built = build(checkout, kind)
        (checkout / kind).mkdir()
        found[kind] = shutil.move(built, checkout / kind)
    return found


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """Make an environment in which the wheel is installed."""
    environment = Environment(tmp_path_factory.mktemp("user"))
    names = environment.install(wheels["wheel"])
    assert {name for name in names if "dist-info" not in name} == {"gpt_duet"}
    return environment


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Make a user's project, which works without the kit."""
    folder = tmp_path_factory.mktemp("project")
    for name in THEIRS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
        (folder / name / "config.py").write_text(f"OWN = {name[0]!r}\n")
    lines = [f"from {name}.config import OWN as {name}" for name in THEIRS]
    lines += [f"OWN = [{', '.join(THEIRS)}]"]
    (folder / "mine.py").write_text("\n".join(lines) + "\n")
    (folder / "pyproject.toml").write_text(
        "[project]\nname = 'mine'\nversion = '1'\n[tool.setuptools]\n"
        f"py-modules = ['mine']\npackages = {[*THEIRS]}\n"
    )
    return folder


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_all_packages_and_their_files_are_in_the_wheel(installed):
    inside = installed.packages / "gpt_duet"
    for folder in FOLDERS:
        target = inside if folder == "shared" else inside / folder
        assert (target / "py.typed").is_file()
        for path in (ROOT / folder).rglob("*"):
            file = path.relative_to(ROOT / folder)
            left_out = path.suffix in (".pyc", ".md") or path.is_dir()
            if {"pictures", "measured"} & {*file.parts}:
                continue
            assert left_out or (target / file).is_file(), file
    code = (
        "import gpt_duet; print(*map(gpt_duet.__getattr__, gpt_duet.__all__))"
    )
    assert "GPTConfig" in installed.python(code)
    agents = (ROOT / "AGENTS.md").read_text("utf-8")
    assert installed.duet("agents") == agents


def test_pytest_finds_the_plugin_of_the_wheel(installed, tmp_path):
    """Other plugins are installed, and the project has no test file."""
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.gpt-duet.targets.'tiny:Tiny']\nonly = ['shape', 'causality']\n"
    )
    words = ("-m", "pytest", "--gpt-duet", "-n", "1", "--cov=tiny")
    python = installed.scripts / "python"
    out = run(python, *words, cwd=tmp_path, dependencies=True)
    assert "2 passed" in out
    # pytest lists the plugin
    assert f"gpt-duet-{gpt_duet.__version__}" in out


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("first", ["kit", "theirs"])
def test_a_project_with_packages_named_as_ours(
    wheels, project, tmp_path, kind, first
):
    environment = Environment(tmp_path)
    both = {"kit": wheels[kind], "theirs": build(project, "wheel")}
    (second,) = {*both} - {first}
    brought = {}
    for name in (first, second):
        before = contents(environment.packages)
        environment.install(both[name])
        after = contents(environment.packages)
        assert before.items() <= after.items()  # no file was overwritten
        brought[name] = {k: v for k, v in after.items() if k not in before}
    for code in BOTH_WORK.values():
        environment.python(code)
        # run in the folder of a user's project
        environment.python(code, cwd=project)
    distribution = {"kit": "gpt-duet", "theirs": "mine"}
    environment.pip("uninstall", "-y", distribution[first])
    assert contents(environment.packages) == brought[second]
    environment.python(BOTH_WORK[second])
    environment.pip("uninstall", "-y", distribution[second])
    assert not contents(environment.packages)


def test_the_command_runs_next_to_folders_named_as_ours(installed, project):
    expression = "annotated.model:make_model(9, N=1, d_model=8, d_ff=8, h=2)"
    out = installed.duet("check", expression, "--only", "check_shape")
    assert "1 passed" in out
    for name in THEIRS:
        shutil.copytree(project / name, installed.folder / name)
    (installed.folder / "user.py").write_text(
        "from annotated.config import OWN\nfrom shared.config import OWN\n"
        "from gpt_duet import GPTConfig\nfrom gpt_duet.annotated import *\n"
        "def build():\n    return build_model(GPTConfig(9, 8, 1, 1, 8))\n"
    )
    only = ("--only", "check_causality", "--only", "check_shape")
    targets = ("mingpt_style", "annotated", "user.py:build", "user:build")
    out = installed.duet("check", *targets, *only)
    assert out.count("check_causality") == len(targets)
    assert "failed" not in out.replace("0 failed", "")
    out = installed.duet("compare", "--html", "page.html")
    assert "one function" in out
    page = (installed.folder / "page.html").read_text(encoding="utf-8")
    assert "</html>" in page
    assert "gpt_duet/annotated" not in page
    assert "annotated/attention.py" in page
    out = installed.duet("diff", "annotated", "mingpt_style")
    assert "gpt_duet/" not in out
    assert "gpt-duet bench" in installed.duet("bench", "--help")
