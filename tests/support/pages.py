"""Read the Markdown of the project, and run its code blocks.

The language and the title of a block say what a test does with it:

    ```python title="model.py"      a file, written into the project
    ```diff title="model.py"        a change of that file
    ```python                       a program, run in the project
    ```sh                           commands, which end with status 0
    ```console                      `$ command` and lines of its output,
                                    where `...` is any text
    ```toml, yaml, json             read, and written where it has a title
    ```text, c                      only shown

If a command ends with another status, it says so: `command  # status 1`.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Path(__file__).parent / "guide"
FENCE = re.compile(
    r'^( *)```(\w+)(?: title="([^"]+)")?[ ]*\n(.*?)^\1```$', re.M | re.S
)
# commands that install something or need a repository are not run
NOT_RUN = re.compile(r"pip install|make |echo \"pip install")
# pages for developers, or about the past
ELSEWHERE = ("tests", "CHANGELOG.md")


class Block(NamedTuple):
    language: str
    title: str
    text: str


def pages():
    """Return the pages for users, by their paths from the root."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    found = [ROOT / "README.md", *docs, ROOT / "AGENTS.md"]
    return {str(path.relative_to(ROOT)): path for path in found}


def markdown():
    """Return all Markdown files of the project."""
    rooms = ("shared", "annotated", "mingpt_style", "benchmarks", "tests")
    inside = [f for room in rooms for f in sorted((ROOT / room).rglob("*.md"))]
    return [*pages().values(), *sorted(ROOT.glob("[C-S]*.md")), *inside]


def blocks(text):
    """Return the code blocks of a page."""
    found = []
    for indent, language, title, code in FENCE.findall(text):
        lines = [row.removeprefix(indent) for row in code.splitlines()]
        found.append(Block(language, title, "\n".join([*lines, ""])))
    return found


def commands(block):
    """Return a block's commands, each with its status and its output."""
    if block.language == "console":
        parts = re.split(r"^\$ ", block.text, flags=re.M)[1:]
        cut = [part.partition("\n") for part in parts]
        return [(command, None, output) for command, _, output in cut]
    found = []
    for row in block.text.replace("\\\n", " ").splitlines():
        command, _, comment = row.partition("  #")
        status = re.search(r"status (\d)", comment)
        if command.strip() and not row.startswith("#"):
            found.append(
                (command.strip(), int(status[1]) if status else 0, "")
            )
    return found


def kit_words(text):
    """Yield the arguments of each gpt-duet command on a page."""
    lines = [
        command
        for block in blocks(text)
        if block.language in ("sh", "console")
        for command, _, _ in commands(block)
    ]
    outside = FENCE.sub("", text)
    lines += re.findall(r"`(gpt-duet [a-z][^`]+)`", outside)
    for line in lines:
        line = line.replace("-m gpt_duet ", "\ngpt-duet ").split("\n")[-1]
        if line.startswith("gpt-duet "):
            words = shlex.split(line, comments=True)
            stop = [i for i, w in enumerate(words) if w in (">", ">>", "|")]
            yield words[1 : stop[0] if stop else None]


def change(source, diff):
    """Apply a diff, whose lines start with a space, - or +, to a source."""
    rows = diff.splitlines()
    before = "\n".join(row[1:] for row in rows if row[0] != "+")
    after = "\n".join(row[1:] for row in rows if row[0] != "-")
    assert source.count(before) == 1, before
    return source.replace(before, after)


def make_project(folder):
    """Make the project in which the commands of the pages run."""
    shutil.copytree(PROJECT, folder, dirs_exist_ok=True)
    for tutorial in ("check", "port"):
        text = (ROOT / "docs/tutorials" / f"{tutorial}.md").read_text("utf-8")
        mended = {}
        for block in blocks(text):
            file = folder / block.title
            if block.language == "python" and block.title:
                file.write_text(block.text, "utf-8")
            if block.language == "diff":
                source = mended.get(file) or file.read_text("utf-8")
                mended[file] = change(source, block.text)
        for file, source in mended.items():
            if file.name == "model.py":
                (folder / "fixed.py").write_text(source, "utf-8")
    for file in folder.glob("test_*.py"):
        file.unlink()
    shutil.copytree(ROOT / "docs/ports", folder, dirs_exist_ok=True)
    (folder / "input.txt").write_text(200 * "the cat sat on the mat. ")
