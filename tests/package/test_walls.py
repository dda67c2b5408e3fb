"""How many lines a module may import, and imports that no linter checks.

import-linter checks which packages inside shared may import each other (see
pyproject.toml). The benchmarks import the kit by its installed name, so their
imports are checked here.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSIDE = ("annotated", "benchmarks", "mingpt_style")
# Upper bounds for the files and lines that a module's imports reach. If an
# import exceeds a bound, it belongs elsewhere. Only a new rule may raise one.
MET = {
    "gpt_duet.invariants.checks.causality": (68, 19_000),
    "gpt_duet.comparison.values.diff": (64, 17_450),
    "gpt_duet.benchmarks.measure": (32, 4_580),
}


def file_of(module):
    _, *parts = module.split(".")
    if not parts or parts[0] not in INSIDE:
        parts = ["shared", *parts]
    path = ROOT.joinpath(*parts)
    package = path / "__init__.py"
    return package if package.is_file() else path.with_suffix(".py")


@cache
def imports_of(module):
    """Return the kit's modules that a module, or a function in it, imports."""
    file = file_of(module)
    parts = module.split(".")
    package = parts if file.name == "__init__.py" else parts[:-1]
    tree = ast.parse(file.read_text("utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        up = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*up, *filter(None, [node.module])])
        for alias in node.names:
            name = f"{base}.{alias.name}"
            found.add(name if file_of(name).is_file() else base)
    return {name for name in found if name.split(".")[0] == "gpt_duet"}


def met_by(module):
    """Return the modules that a module's imports reach, and their packages."""
    met, ahead = set(), {module}
    while ahead:
        name = ahead.pop()
        met.add(name)
        ahead |= imports_of(name) - met
        # the enclosing package runs as well, but only its own lines count
        parts = name.split(".")
        met |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return met


@pytest.mark.parametrize("module", MET)
def test_a_module_imports_no_more_than_its_bound(module):
    files = [file_of(name) for name in met_by(module)]
    lines = sum(len(f.read_text("utf-8").splitlines()) for f in files)
    most_files, most_lines = MET[module]
    assert len(files) <= most_files
    assert lines <= most_lines


def test_code_for_one_check_is_in_its_package():
    room = "gpt_duet.invariants"
    files = [*(ROOT / "shared/invariants").rglob("*.py")]
    users = dict[str, set[str]]()
    for file in files:
        parts = file.relative_to(ROOT / "shared").with_suffix("").parts
        module = ".".join(("gpt_duet", *parts)).removesuffix(".__init__")
        for name in imports_of(module):
            users.setdefault(name, set()).add(module)
    checks = f"{room}.checks."
    for helper, by in users.items():
        own = helper.startswith(f"{room}.") and not helper.startswith(checks)
        if own and all(name.startswith(checks) for name in by):
            names = {name.removeprefix(checks).split(".")[0] for name in by}
            assert len(names) > 1, f"{helper} serves {names} only"


def test_a_diff_by_value_imports_no_check_and_no_proof():
    rooms = {name.split(".")[1] for name in met_by(
        "gpt_duet.comparison.values.diff"
    ) if "." in name}  # fmt: skip
    assert not rooms & {"invariants", "proof", "distributed", "scoring"}


@pytest.mark.parametrize("module", ["measure", "models"])
def test_the_benchmarks_import_no_checks_and_pages(module):
    met = met_by(f"gpt_duet.benchmarks.{module}")
    rooms = {name.split(".")[1] for name in met if "." in name}
    walled = {"invariants", "proof", "tracing", "comparison", "cli"}
    assert not rooms & walled
