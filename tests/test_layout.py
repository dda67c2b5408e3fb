"""The house: who imports whom, same names in both styles, budgets."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STYLES = ("annotated", "mingpt_style")
PACKAGES = (*STYLES, "shared", "benchmarks")
ALLOWED = {
    "annotated": {"shared"},
    "mingpt_style": {"shared"},
    "shared": set(),
    "benchmarks": {"annotated", "mingpt_style", "shared"},
}


def files(package):
    return sorted((ROOT / package).rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    ours = {*PACKAGES, "tests"} - {package}
    for path in files(package):
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops & ours <= ALLOWED[package], path


@pytest.mark.parametrize("style", STYLES)
def test_a_style_imports_itself_relatively(style):
    for path in files(style):
        assert not any(n.split(".")[0] == style for n in imports(path)), path


def test_shared_names_no_style_in_its_imports():
    # the command may name the styles as text; nothing else in shared does
    for path in files("shared"):
        if "cli" not in path.parts:
            text = code(path)
            assert not any(f'"{style}"' in text for style in STYLES), path


def test_the_same_concept_has_the_same_file_in_both_styles():
    concepts = {"attention", "feed_forward", "block", "model", "weights"}
    for style in STYLES:
        assert concepts <= {path.stem for path in files(style)}


def test_five_folders_and_no_sixth():
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir()
        and not path.name.startswith(".")
        and not path.name.endswith(".egg-info")
        and path.name not in ("__pycache__", "build", "dist")
    }
    assert folders == {*PACKAGES, "tests"}


def code(path):
    """The text of a file without comments, docstrings and empty lines."""
    source = path.read_text(encoding="utf-8")
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            skipped.update(range(node.lineno, node.end_lineno + 1))
    lines = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):
            for number in range(token.start[0], token.end[0] + 1):
                if number not in skipped:
                    lines[number] = source.splitlines()[number - 1]
    return "\n".join(lines.values())


@pytest.mark.parametrize("style", STYLES)
def test_a_style_stays_small(style):
    sizes = {p.stem: len(code(p).splitlines()) for p in files(style)}
    assert max(sizes.values()) <= 120, sizes
    # these are not the decoder: checkpoints, history, words for the views
    apart = {"weights", "ladder", "glossary"}
    assert sum(n for f, n in sizes.items() if f not in apart) <= 350, sizes


@pytest.mark.parametrize("style", STYLES)
def test_a_forward_stays_short_and_narrow(style):
    for path in files(style):
        text = path.read_text(encoding="utf-8")
        assert max(map(len, text.splitlines())) <= 79, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == "forward":
                body = node.body[1:]  # without its docstring
                length = node.end_lineno - body[0].lineno + 1
                assert length <= 25, (path, length)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_pickled(package):
    for path in files(package):
        found = {name.split(".")[0] for name in imports(path)}
        assert not found & {"pickle", "dill", "joblib"}, path
        text = code(path)
        assert "torch.load(" not in text, path
        assert "torch.save(" not in text, path
