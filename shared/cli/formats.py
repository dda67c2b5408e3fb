"""Write the results of checks for GitHub: annotations, summaries, SARIF."""

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
    check: str  # name of the check, or "target"
    message: str
    file: str  # path of the file from the repository's root; "" if unknown
    line: int


def faults(models: Models) -> Iterator[Fault]:
    """Yield all faults of the models.

    The line of a fault is the first place in its result that lies in the
    repository, or else the first line of the target's file.
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
    """Yield, for each fault, an ::error command for a GitHub workflow."""
    for fault in faults(models):
        place = f"file={_escape(fault.file, ':,')},line={fault.line},"
        title = _escape(f"{fault.check}: {fault.model}", ":,")
        start = f"::error {place if fault.file else ''}title={title}"
        yield f"{start}::{_escape(fault.message)}"


def write_summary(models: Models) -> None:
    """Add a table and all faults to the summary of the workflow's step."""
    lines = ["### gpt-duet check", "", "| model | passed | failed | other |"]
    lines += ["| --- | --- | --- | --- |"]
    for model in models:
        found = [r["status"] for r in model.get("results", [])]
        passed, failed = found.count("passed"), sum(s in BAD for s in found)
        counts = f"{passed} | {failed} | {len(found) - passed - failed}"
        counts = "not checked | - | -" if "error" in model else counts
        kept = " (kept from an earlier run)" if model.get("kept") else ""
        lines.append(f"| {_as_text(model['model'])}{kept} | {counts} |")
    if found := [*faults(models)]:
        lines += ["", *map(_bullet, found)]
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")


def _bullet(fault: Fault) -> str:
    """Return a fault as a line in a list."""
    place = f", {_as_text(fault.file)}:{fault.line}" if fault.file else ""
    where = f"{_as_text(fault.model)}{place}"
    return f"- **{fault.check}**, {where}: {_as_text(fault.message)}"


def _as_text(text: str) -> str:
    """Return a text on one line, escaped for Markdown."""
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


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
    """Return a file's path from the repository's root; "" for a file outside.

    In a workflow, the root is the workspace; otherwise it is the current
    folder. Packages may be in a folder "src".
    """
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    for path in (Path(file).resolve(), Path("src", file).resolve()):
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return ""


def _escape(text: str, also: str = "") -> str:
    """Escape a text for a workflow command, with further signs in `also`."""
    # the percent sign first, because escapes contain it
    for sign in "%\r\n" + also:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text
