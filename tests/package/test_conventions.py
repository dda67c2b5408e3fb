"""Files that other tools read: metadata, hooks, templates, the changelog."""

import re
import shlex
import tomllib
from pathlib import Path

import yaml
from typer.main import get_command

import gpt_duet
from gpt_duet.cli import build_app

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def read(name):
    return (ROOT / name).read_text("utf-8")


def test_extras_are_for_users_and_groups_for_developers():
    extras = PROJECT["project"]["optional-dependencies"]
    groups = PROJECT["dependency-groups"]
    assert {*extras} == {"peers", "field", "testing"}
    assert {*groups} == {"test", "lint", "docs"}
    for name in groups:
        assert f"--group {name}\n" in read("Makefile")


def test_the_offered_hook_runs_in_the_users_environment():
    (hook,) = yaml.safe_load(read(".pre-commit-hooks.yaml"))
    assert hook["language"] == "system"
    name, command, *options = shlex.split(hook["entry"])
    assert name == "gpt-duet"
    app = get_command(build_app())
    app.commands[command].make_context(command, options)


def test_hooks_name_tools_of_the_lint_group():
    (own,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    tools = [shlex.split(hook["entry"])[0] for hook in own["hooks"]]
    lint = " ".join(PROJECT["dependency-groups"]["lint"])
    for tool in tools:
        folder, name = tool.rsplit("/", 1)
        assert folder == ".venv/bin"
        assert name.replace("lint-imports", "import-linter") in lint


def test_issue_forms_ask_for_the_model_file_and_the_json():
    forms = [*(ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")]
    forms += [ROOT / ".github/ISSUE_TEMPLATE/crash.yml"]
    assert len(forms) == 2
    for form in forms:
        fields = yaml.safe_load(form.read_text("utf-8"))["body"]
        labels = " ".join(one["attributes"]["label"] for one in fields)
        assert "model file" in labels
        assert "JSON" in labels


def test_the_citation_names_a_version_of_the_changelog():
    citation = yaml.safe_load(read("CITATION.cff"))
    head = f"## [{citation['version']}] - {citation['date-released']}\n"
    assert head in read("CHANGELOG.md")
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_changelog_has_an_entry_a_line():
    versions = re.split(r"^## ", read("CHANGELOG.md"), flags=re.M)[1:]
    heads = [version.split("\n")[0] for version in versions]
    assert heads[0] == "[Unreleased]"
    dated = [
        re.fullmatch(r"\[([\d.]+)\] - \d{4}-\d\d-\d\d", h) for h in heads[1:]
    ]
    assert dated[0][1] == gpt_duet.__version__
    assert all(dated)
    for version in versions:
        for kind, *entries in (
            part.strip().split("\n")
            for part in re.split(r"^### ", version, flags=re.M)[1:]
        ):
            assert kind in KINDS
            lines = [*filter(None, entries)]
            assert lines
            assert all(line.startswith("- ") for line in lines)
            assert max(map(len, lines)) <= 110
