"""Generate pages of the guide from the code: checks, command, settings.

`mkdocs.yml` names this file as a hook. `pages()` returns the generated pages,
so that a test can read them without a build.
"""

import re
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from gpt_duet.benchmarks.app import app as bench
from gpt_duet.cli import COMMANDS, build_app
from gpt_duet.invariants import CHECKS
from gpt_duet.running.ways import CASES, EVAL, Case
from gpt_duet.settings import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
PARTS = {  # by part of a check's docstring: the heading on its page
    "Why": "Why it exists",
    "How": "How it checks",
    "If it fails": "When it fails",
    "Reports": "Public reports",
}
# an issue on GitHub, as owner/name number
ISSUE = re.compile(r"\b([\w.-]+/[\w.-]+) (\d+)\b")
WIDTH = 80  # columns of a help text


def ways() -> dict[str, list[str]]:
    """Return, for each check, the cases in which it runs a model."""
    tried = {}
    for name, check in CHECKS.items():
        module = vars(sys.modules[check.__module__]).values()
        own = {case for case in module if isinstance(case, Case)}
        own |= {case for case, names in CASES.items() if name in names}
        cases = [case for case in CASES if case in own | {EVAL}]
        tried[name] = [case.name or "in eval mode" for case in cases]
    return tried


def _plain(text: str) -> str:
    """Return a text of a docstring, escaped for Markdown."""
    text = re.sub(r"([\\*<\[\]|])", r"\\\1", " ".join(text.split()))
    return text[:1].upper() + text[1:]


def parts_of(check: Any) -> dict[str, str]:
    """Return the parts of a check's docstring by their names."""
    names = "|".join(PARTS)
    found = re.split(rf"^\s*({names}):", check.__doc__, flags=re.M)
    return dict(zip(found[1::2], map(str.strip, found[2::2]), strict=True))


def check_page(name: str) -> str:
    """Return the page of one check."""
    check, short = CHECKS[name], name.removeprefix("check_")
    lines = [f"# {short}", "", f"**{_plain(check.says)}**", ""]
    for part, text in parts_of(check).items():
        text = _plain(text)
        if part == "If it fails":  # start a paragraph at each quoted message
            text = re.sub(r'(?<=[.]) (?=")', "\n\n", text)
        if part == "Reports":
            address = r"[\1 \2](https://github.com/\1/issues/\2)"
            text = ISSUE.sub(address, text)
        lines += [f"## {PARTS[part]}", "", text, ""]
    only = f"gpt-duet check my_pkg.model:build --only {short}"
    lines += ["## Run only this check", "", "```sh", only, "```", ""]
    if check.slow:
        lines += ["It trains the model, and runs only with --only.", ""]
    lines += ["## Ways of running that it tries", ""]
    lines += [f"- {way}" for way in ways()[name]]
    return "\n".join([*lines, ""])


def checks_page() -> str:
    """Return the list of all checks."""
    lines = [
        "# The checks",
        "",
        f"`gpt-duet check` runs {len(CHECKS)} checks.",
    ]
    lines += ["`--only NAME` runs one, `--skip NAME` leaves one out."]
    lines += ["", "| check | a model passes if |", "| --- | --- |"]
    for name, check in CHECKS.items():
        short = name.removeprefix("check_")
        lines.append(f"| [{short}]({short}.md) | {_plain(check.says)} |")
    after = """
A check that does not apply is skipped, and the message gives the reason. A
check whose failure has the same cause as an earlier failure is skipped as
well: one cause is one failure. A failure by an exception names your line and
the call that raised it. The status `error` is a fault of the kit.
"""
    return "\n".join([*lines, after])


def command_page() -> str:
    """Return the help of each subcommand."""
    app: Any = get_command(build_app())
    lines = []
    for name in COMMANDS:
        command = get_command(bench) if name == "bench" else app.commands[name]
        kind = command.context_class
        context = kind(command, info_name=f"gpt-duet {name}")
        context.max_content_width = context.terminal_width = WIDTH
        lines += [f"## {name}", "", "```text", command.get_help(context)]
        lines += ["```", ""]
    return _fill("command", "help", lines)


def settings_page() -> str:
    """Return a table of the settings, with their names in shell and Python."""
    rows = [
        "| pyproject.toml, shell | in Python | meaning |",
        "| --- | --- | --- |",
    ]
    for one in OPTIONS:
        same = one.name == one.option.replace("-", "_")
        python = (
            "the same" if same and "-" not in one.option else f"`{one.name}`"
        )
        rows.append(
            f"| `{one.option}` | {python} | {_plain(one.shell.help)} |"
        )
    return _fill("pyproject", "settings", rows)


def _fill(page: str, mark: str, lines: list[str]) -> str:
    """Return a page of the reference, with its comment replaced by lines."""
    file = ROOT / "docs" / "reference" / f"{page}.md"
    return file.read_text("utf-8").replace(
        f"<!-- {mark} -->", "\n".join(lines)
    )


FILLED = {
    "reference/command.md": command_page,
    "reference/pyproject.md": settings_page,
}


def pages() -> dict[str, str]:
    """Return the generated pages by their paths below docs."""
    made = {"reference/checks/index.md": checks_page()}
    for name in CHECKS:
        path = f"reference/checks/{name.removeprefix('check_')}.md"
        made[path] = check_page(name)
    return made


def on_config(config: Any) -> Any:
    """Add a page for each check to the navigation."""
    reference = next(e["Reference"] for e in config.nav if "Reference" in e)
    entry = next(e for e in reference if isinstance(e, dict))
    paths = [f"{name.removeprefix('check_')}.md" for name in CHECKS]
    paths = ["index.md", *sorted(paths)]
    entry["The checks"] = [f"reference/checks/{path}" for path in paths]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of docs."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_read_source(page: Any, config: Any) -> str | None:
    """Return a page with its generated part, or None for other pages."""
    make = FILLED.get(page.file.src_uri)
    return make() if make else None
