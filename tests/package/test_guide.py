"""The commands, programs and links of README and guide work; the
site builds."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from pages import (
    NOT_RUN,
    ROOT,
    blocks,
    change,
    commands,
    kit_words,
    make_project,
    markdown,
    pages,
)
from typer.main import get_command

from gpt_duet.benchmarks.app import app as bench
from gpt_duet.cli import COMMANDS, build_app
from gpt_duet.cli.job import read_project
from gpt_duet.invariants import CHECKS, Report
from gpt_duet.invariants.report import CheckResult
from gpt_duet.proof.proof import Proof
from gpt_duet.settings import OPTIONS

# --check-shapes does not reach the other processes that these tests start
pytestmark = pytest.mark.unhooked
PAGES = pages()
SHOWN = ("text", "c")  # blocks that no test runs
SLOW = 300  # most seconds that a command may take
PYTHON = Path(sys.executable)


def hooks():
    path = ROOT / "docs" / "hooks.py"
    spec = importlib.util.spec_from_file_location("guide_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = hooks().pages()


# --- Every page, fast -------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_blocks_of_known_kinds(name):
    text = PAGES[name].read_text("utf-8")
    found = blocks(text)
    assert text.count("```") == 2 * len(found)
    for block in found:
        assert block.language in (
            *("python", "diff", "sh", "console", "toml", "yaml", "json"),
            *SHOWN,
        )
        if block.language == "python":
            compile(block.text, name, "exec")


@pytest.mark.parametrize("name", [*PAGES, *MADE])
def test_the_commands_of_a_page_have_options_that_exist(name):
    text = MADE[name] if name in MADE else PAGES[name].read_text("utf-8")
    app = get_command(build_app())
    for command, *words in kit_words(text):
        if command in ("help", "--install-completion"):
            continue
        assert command in COMMANDS, command
        if words in (["-h"], ["--list"]):
            continue
        one = (
            get_command(bench) if command == "bench" else app.commands[command]
        )
        one.make_context(command, [*words])


def names_of(text):
    """Return the anchors of a page, as GitHub and the guide make them."""
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M
    )
    plain = [
        re.sub(r"[`*]|\]\([^)]*\)|\[", "", head).lower() for head in heads
    ]
    return {
        re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", head)) for head in plain
    }


@pytest.mark.parametrize(
    "path", markdown(), ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_links_of_a_file_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
    text = re.sub(r"`[^`]+`", "", text)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if "//" in file:
            continue
        target = (path.parent / file).resolve() if file else path
        made = MADE.get(str(target).removeprefix(f"{ROOT}/docs/"))
        assert target.exists() or made, link
        content = made or (target.read_text("utf-8") if anchor else "")
        assert not anchor or anchor in names_of(content), link


def test_the_readme_is_short():
    lines = PAGES["README.md"].read_text("utf-8").splitlines()
    assert len(lines) <= 150
    assert max(len(row) for row in lines if row.startswith("|")) <= 150
    first = next(i for i, row in enumerate(lines) if row.startswith("$ gpt"))
    assert first < 15  # the first command is visible without scrolling


def test_the_readme_shows_a_run_of_all_checks():
    found = [
        command
        for block in blocks(PAGES["README.md"].read_text("utf-8"))
        if block.language == "console" and "what was found" in block.text
        for command in commands(block)
    ]
    ((command, _, output),) = found  # a slow test requires this output
    assert re.fullmatch(r"gpt-duet check \S+:\w+", command)
    assert re.search(r"^\d+ passed, .* entropy_bound", output, re.M)
    shown = re.findall(r"^check_(\w+) +passed", output, re.M)
    assert {f"check_{name}" for name in shown} < CHECKS.keys()


def test_the_readme_names_each_check():
    (table,) = re.findall(
        r"\| checks \|.*?\n\n", PAGES["README.md"].read_text("utf-8"), re.S
    )
    named = re.findall(
        r"\w+", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.M))
    )
    assert {f"check_{n}" for n in named} - {"check_checks"} == CHECKS.keys()


# --- The generated pages ----------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_has_a_page_with_all_parts(name):
    short = name.removeprefix("check_")
    page = MADE[f"reference/checks/{short}.md"]
    for head in (
        "Why it exists",
        "How it checks",
        "When it fails",
        "Public reports",
    ):
        (text,) = re.findall(rf"^## {head}\n\n(.+)\n$", page, re.M)
        assert len(text) > 20
    assert "- in eval mode" in page
    assert f"({short}.md)" in MADE["reference/checks/index.md"]


def test_the_page_of_a_check_names_its_variants():
    page = MADE["reference/checks/causality.md"]
    assert "- with a left-padded attention mask\n" in page
    assert "left-padded" not in MADE["reference/checks/purity.md"]


def test_the_page_of_the_command_has_every_option():
    page = hooks().command_page()
    for one in OPTIONS:
        assert f"--{one.option} " in page
    assert all(f"## {name}\n" in page for name in COMMANDS)
    assert max(map(len, page.splitlines())) < 100


def test_the_page_of_settings_has_every_setting():
    page = hooks().settings_page()
    assert all(f"| `{one.option}` |" in page for one in OPTIONS)


def fields_in(text, kind):
    """Return the names in the first column of a page's table of fields."""
    table = text.split(f"<!-- fields: {kind} -->")[1].split("\n\n")[1]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    return set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_the_fields_of_the_json_are_those_of_the_code():
    text = PAGES["docs/reference/json.md"].read_text("utf-8")
    report = {*Report("m", 2, 2).to_dict()}
    assert fields_in(text, "Report") == report | {"error", "places"}
    result = {field.name for field in fields(CheckResult)}
    assert fields_in(text, "CheckResult") == result
    assert fields_in(text, "Proof") == {*Proof().to_dict()}


def test_completion_completes_a_command():
    env = {"_GPT_DUET_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    env |= {"COMP_WORDS": "gpt-duet che"}
    command = PYTHON.parent / "gpt-duet"
    done = subprocess.run(
        [command], env=os.environ | env, capture_output=True, text=True
    )
    assert done.stdout.split() == ["check"]


def test_agents_prints_agents_md(done):
    assert done("agents")[0] == (ROOT / "AGENTS.md").read_text("utf-8")


def test_the_make_targets_of_the_pages_exist():
    rules = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    for path in markdown():
        for name in re.findall(
            r"`?\bmake ([a-z-]+)`|^make ([a-z-]+)",
            path.read_text("utf-8"),
            re.M,
        ):
            assert "".join(name) in rules, path


# --- Every block is run -----------------------------------------------------


class Reader:
    """A reader who follows a page in a project, block by block."""

    def __init__(self, folder):
        self.folder, self.names = folder, ""
        path = os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]])
        self.env = os.environ | {
            "PATH": path,
            "COLUMNS": "96",
            "COV_CORE_SOURCE": "",
        }
        self.env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def do(self, block):
        if block.language in ("sh", "console"):
            for command, status, output in commands(block):
                if not NOT_RUN.match(command):
                    self.run(command, status, output)
        elif block.language == "diff":
            file = self.folder / block.title
            file.write_text(
                change(file.read_text("utf-8"), block.text), "utf-8"
            )
        elif block.language == "python" and not block.title:
            program = self.folder / "block.py"
            program.write_text(self.names + block.text, "utf-8")
            self.run(
                "pytest -q block.py"
                if "def test" in block.text
                else "python block.py",
                0,
                "",
            )
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert yaml.safe_load(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        if block.title and block.language != "diff":
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, "utf-8")
        if block.title == "pyproject.toml":
            assert read_project(self.folder)

    def run(self, command, status, output):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=SLOW,
        )
        said = done.stdout + done.stderr
        if status is not None:
            assert done.returncode == status, f"{command}\n{said}"
        wanted = [squeezed(part) for part in output.split("...")]
        at, text = 0, squeezed(said)
        for part in wanted:
            found = text.find(part, at)
            assert found >= 0, f"{command}\nmissing: {part}\n{said}"
            at = found + len(part)


def squeezed(text):
    """Return a text in one line, with all float64 rounding errors equal."""
    return re.sub(r"\b\d(\.\d+)?e-1[5-7]\b", "1e-16", " ".join(text.split()))


RUN = [name for name, path in PAGES.items() if blocks(path.read_text("utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RUN if n != "docs/found.md"])
def test_a_reader_can_do_what_a_page_says(name, tmp_path):
    """The blocks of a page run in order; found.md has its own test."""
    make_project(tmp_path)
    reader = Reader(tmp_path)
    if name == "docs/how-to/any_language.md":
        assert shutil.which("cc"), "a C compiler is missing"
    if name == "docs/reference/json.md":
        (tmp_path / "before.json").write_bytes(
            (ROOT / "benchmarks/measured/cpu.json").read_bytes()
        )
    for block in blocks(PAGES[name].read_text("utf-8")):
        reader.do(block)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    import nbclient
    import nbformat

    path = ROOT / "docs/tutorials/first_steps.ipynb"
    book = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    nbclient.NotebookClient(
        book,
        timeout=SLOW,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    out = json.dumps([cell.get("outputs", []) for cell in book.cells])
    assert "['check_causality', 'check_dtype']" in out
    assert "port.py:40 `gelu`" in out
    assert "one function: 22 intermediate values" in out
    # the notebook uses the files of the tutorials
    cells = {cell.source for cell in book.cells}
    for tutorial, names in (
        ("check", ["model.py"]),
        ("port", ["original.py", "port.py"]),
    ):
        found = blocks(
            PAGES[f"docs/tutorials/{tutorial}.md"].read_text("utf-8")
        )
        for name in names:
            (text,) = (
                b.text
                for b in found
                if (b.language, b.title) == ("python", name)
            )
            assert f"%%writefile {name}\n{text.rstrip()}" in cells


@pytest.mark.slow
def test_the_guide_builds_without_a_warning(tmp_path):
    """The guide is built as by `make docs`; a broken link is a warning."""
    mkdocs = [
        PYTHON,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        tmp_path,
    ]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        mkdocs, cwd=ROOT, env=quiet, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    page = (tmp_path / "reference/checks/causality.html").read_text("utf-8")
    assert "When it fails" in page
    api = (tmp_path / "reference/python.html").read_text("utf-8")
    assert "check_model" in api
    assert "expected_failures" in api
