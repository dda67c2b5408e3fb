"""The results of the checks as GitHub reads them: annotations, SARIF."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ..invariants.report import BAD, ORIGIN

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
Models = Sequence[Mapping[str, Any]]  # as `check --json` writes them


class Fault(NamedTuple):
    """A check that failed, or a target that could not be called."""

    model: str
    check: str  # or "target"
    message: str
    file: str  # from the repository's root; "" where it is not known
    line: int


def faults(models: Models) -> Iterator[Fault]:
    """Yield all that is wrong.

    The line is the first one of the result's places, else the first of the
    target's file; all that are not in the repository are left out.
    """
    for model in models:
        path = model["model"].partition(":")[0]
        stem = path.replace(".", "/")
        own = [(f, 1) for f in (path, f"{stem}.py", f"{stem}/__init__.py")]
        bad = [r for r in model.get("results", []) if r["status"] in BAD]
        if "error" in model:
            places = model.get("places", [])
            message = model["error"]
            bad = [{"name": "target", "message": message, "places": places}]
        for result in bad:
            places = [(at["file"], at["line"]) for at in result["places"]]
            found = ((_in_repository(f), n) for f, n in places + own)
            file, line = next((f for f in found if f[0]), ("", 1))
            name, text = result["name"], result["message"]
            yield Fault(model["model"], name, text, file, line or 1)


def annotations(models: Models) -> Iterator[str]:
    """Yield a command of GitHub's workflows for each fault."""
    for fault in faults(models):
        place = f"file={_escape(fault.file, ':,')},line={fault.line},"
        title = _escape(f"{fault.check}: {fault.model}", ":,")
        start = f"::error {place if fault.file else ''}title={title}"
        yield f"{start}::{_escape(fault.message)}"


def write_summary(models: Models) -> None:
    """Add a table of Markdown to the workflow step's summary, if any."""
    lines = ["### gpt-duet check", "", "| model | passed | failed | other |"]
    lines += ["| --- | --- | --- | --- |"]
    for model in models:
        found = [r["status"] for r in model.get("results", [])]
        passed, failed = found.count("passed"), sum(s in BAD for s in found)
        counts = f"{passed} | {failed} | {len(found) - passed - failed}"
        counts = "not checked | - | -" if "error" in model else counts
        kept = " (kept from an earlier run)" if model.get("kept") else ""
        name = re.sub(r"([\\|<>*_`\[\]])", r"\\\1", model["model"])
        lines.append(f"| {' '.join(name.split())}{kept} | {counts} |")
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")


def sarif(models: Models) -> dict[str, Any]:
    """Return the faults as SARIF 2.1.0."""
    from ..invariants import CHECKS

    says = {name: check.says for name, check in CHECKS.items()}
    says["target"] = "A target is loaded, built and called."
    found = [*faults(models)]
    rules = [
        {"id": name, "shortDescription": {"text": says.get(name, name)}}
        for name in sorted({fault.check for fault in found})
    ]
    results = []
    for fault in found:
        place = {
            "artifactLocation": {"uri": quote(fault.file or "pyproject.toml")},
            "region": {"startLine": fault.line},
        }
        result = {
            "ruleId": fault.check,
            "level": "error",
            "message": {"text": f"{fault.model}: {fault.message}"},
            "locations": [{"physicalLocation": place}],
        }
        results.append(result)
    driver = {"name": "gpt-duet", "version": ORIGIN["version"], "rules": rules}
    run = {"tool": {"driver": driver}, "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _in_repository(file: str) -> str:
    """Return a file's path from the root of the repository, else "".

    The root is the workflow's, else the current folder; a package may lie
    in a folder src.
    """
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    for path in (Path(file).resolve(), Path("src", file).resolve()):
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return ""


def _escape(text: str, also: str = "") -> str:
    """Return a text for a workflow's command; `also`: of its properties."""
    for sign in "%\r\n" + also:  # the percent sign first
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text
