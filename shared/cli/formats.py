"""The results of the checks as GitHub reads them: annotations, SARIF."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..invariants.report import BAD
from ..targets import module_file

# a line of a source file, as messages write it
LINE = re.compile(r"([\w./\\ -]*\w\.py)(?::|, line )(\d+)")
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
Models = Sequence[Mapping[str, Any]]  # as `check --json` writes them
# the model, the check, the message, the file and its line
Fault = tuple[str, str, str, str, int]


def faults(models: Models) -> Iterator[Fault]:
    """Yield all that failed; a model that could not be called, too.

    The line is the one that a leak comes through, else the first one that
    the message names, else the first of the target's file ("" where it is
    not known).
    """
    for model in models:
        name = model["model"]
        at = module_file(name)
        if "error" in model:
            yield name, "target", model["error"], _in_repository(at), 1
        for result in model.get("results", []):
            if result["status"] in BAD:
                leak, message = result["leak"] or {}, result["message"]
                file, line = leak.get("file"), leak.get("line")
                if not (file and line):
                    found = LINE.search(message)
                    file, line = found.groups() if found else (at, 1)
                file = _in_repository(file.strip())
                yield name, result["name"], message, file, int(line)


def annotations(models: Models) -> str:
    """Return a command of GitHub's workflows for each fault, a line each."""
    lines = []
    for model, check, message, file, line in faults(models):
        title = _escape(f"{check}: {model}", ":,")
        place = f"file={_escape(_posix(file), ':,')},line={line},"
        lines.append(
            f"::error {place if file else ''}title={title}::{_escape(message)}"
        )
    return "\n".join(lines)


def summary(models: Models) -> str:
    """Return a table in Markdown, a row for each model, then its faults."""
    lines = ["### gpt-duet check", "", "| model | passed | failed | other |"]
    lines.append("| --- | --- | --- | --- |")
    for model in models:
        found = [r["status"] for r in model.get("results", [])]
        passed, failed = found.count("passed"), sum(s in BAD for s in found)
        counts = f"{passed} | {failed} | {len(found) - passed - failed}"
        counts = "not checked | - | -" if "error" in model else counts
        kept = " (kept from an earlier run)" if model.get("kept") else ""
        lines.append(f"| {_cell(model['model'])}{kept} | {counts} |")
    lines += ["", "| model | check | where | fault |"] * any(faults(models))
    lines += ["| --- | --- | --- | --- |"] * any(faults(models))
    for name, check, message, file, line in faults(models):
        where = f"{file}:{line}" if file else ""
        cells = [_cell(text) for text in (name, check, where, message)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_summary(models: Models) -> None:
    """Add the summary to that of the workflow's step, if there is one."""
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(summary(models))


def sarif(
    models: Models, version: str, checks: Mapping[str, str]
) -> dict[str, Any]:
    """Return the faults as SARIF 2.1.0.

    Args:
        models: what was checked.
        version: of the kit.
        checks: a sentence on each check, by its name.
    """
    found = list(faults(models))
    names = sorted({check for _, check, *_ in found})
    rules = [
        {
            "id": name,
            "shortDescription": {"text": checks.get(name, name)},
        }
        for name in names
    ]
    results = []
    for model, check, message, file, line in found:
        path = Path(file or "pyproject.toml")
        place: dict[str, Any] = {"uri": quote(_posix(str(path)))}
        if path.is_absolute():
            place = {"uri": path.as_uri()}
        region = {"startLine": line}
        location = {"artifactLocation": place, "region": region}
        results.append(
            {
                "ruleId": check,
                "ruleIndex": names.index(check),
                "level": "error",
                "message": {"text": f"{model}: {message}"},
                "locations": [{"physicalLocation": location}],
            }
        )
    driver = {"name": "gpt-duet", "version": version, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _in_repository(file: str) -> str:
    """Return a file's path from the root of the repository, if it is there.

    The root is the workflow's, else the current folder; a package may lie
    in a folder src.
    """
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    for path in (Path(file).resolve(), Path("src", file).resolve()):
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return file


def _escape(text: str, also: str = "") -> str:
    """Return a text for a workflow's command; `also`: of its properties."""
    for sign in "%\r\n" + also:  # the percent sign first
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _cell(text: str) -> str:
    """Return a text for a cell of a table in Markdown."""
    text = re.sub(r"([\\|<>*_`\[\]])", r"\\\1", text)
    return " ".join(text.split())


def _posix(file: str) -> str:
    return file.replace("\\", "/")
