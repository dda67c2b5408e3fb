"""The README says what is the case."""

import re
import shlex

import pytest
import typer
from readme import README, filled

from benchmarks.app import app as benchmarks
from shared.cli import app as gpt_duet

TEXT = README.read_text("utf-8")
TREE = TEXT.split("## What is where")[1].split("```")[1]


def test_the_tables_are_those_of_the_tests():
    assert filled(TEXT) == TEXT, "run python tests/readme.py"


def test_every_file_it_names_is_there():
    folder = README.parent
    for line in TREE.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = README.parent / name
            assert folder.is_dir(), name
        else:
            assert (folder / name).exists(), name
    for picture in re.findall(r"\]\(((?:shared|benchmarks)/\S+)\)", TEXT):
        assert (README.parent / picture).is_file(), picture


@pytest.mark.parametrize(
    "package", ["annotated", "mingpt_style", "shared", "benchmarks"]
)
def test_every_module_is_in_the_tree(package):
    part = re.split(r"\n(?=\S)", TREE.split(f"\n{package}/")[1])[0]
    named = {line.split()[0].rstrip("/") for line in part.splitlines()[1:]}
    there = {
        path.name
        for path in (README.parent / package).iterdir()
        if path.suffix == ".py" or path.is_dir()
    } - {"__init__.py", "__main__.py", "__pycache__"}
    assert named >= there, there - named


@pytest.mark.parametrize(
    "line",
    re.findall(r"^(?:gpt-duet|python -m benchmarks)\b.*$", TEXT, re.MULTILINE),
)
def test_every_command_knows_the_options_it_is_shown_with(line):
    program, *words = shlex.split(line, comments=True)
    app = gpt_duet
    if program == "python":
        app, words = benchmarks, [*words[2:], "forward"]
    elif words[0] == "bench":
        app, words = benchmarks, [*words[1:], "forward"]
    command = typer.main.get_command(app).commands[words[0]]
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
