"""Facts are data: no code parses a sentence that the kit wrote.

Code that compares, splits or searches a sentence breaks when the sentence is
reworded. Code may read the texts of torch, Python and the user. Each function
that does so is listed here, with the author of the text.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# fields of records that hold a sentence
SENTENCES = {"message", "says", "reason", "note", "words", "open_text"}
READS = {  # methods of a string
    *("startswith", "endswith", "removeprefix", "removesuffix", "partition"),
    *("rpartition", "split", "rsplit", "replace", "find", "index", "count"),
}
SEARCHES = {  # functions of re, and methods of its patterns
    *("search", "match", "fullmatch", "findall", "finditer", "split", "sub"),
    "subn",
}
OF_OTHERS = {  # file and function: the author of the text, and its subject
    ("shared/console.py", "run"): "of torch: memory is short",
    ("shared/running/meeting.py", "_find_gradients"): "of torch: no kernel",
    ("shared/running/meeting.py", "find_inputs"): "of the model: a refusal",
    (
        "shared/invariants/checks/dtype/__init__.py",
        "_answer_in",
    ): "of torch: no kernel",
    (
        "shared/invariants/checks/dtype/__init__.py",
        "_check_device",
    ): "of torch: devices",
    ("shared/tracing/pieces.py", "require_half"): "of torch: dtypes",
    ("shared/running/errors.py", "causes_of"): "what a model raised, twice",
    ("shared/invariants/report.py", "row"): "ours, cut into lines to print",
}


def sources():
    rooms = ("shared", "benchmarks", "annotated", "mingpt_style")
    return [f for room in rooms for f in sorted((ROOT / room).rglob("*.py"))]


def is_sentence(node):
    """Return whether an expression is the text of an exception or a report."""
    if isinstance(node, ast.Attribute):
        return node.attr in SENTENCES
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("str", "sentence")
        and bool(node.args)
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id in ("error", "cause", "exception", "first", "why")
    )


def reads(node):
    """Return whether an expression compares, splits or searches a sentence."""
    if isinstance(node, ast.Compare):
        # code may test whether a list already has a sentence
        member = isinstance(node.ops[0], ast.In | ast.NotIn)
        sides = [*([] if member else [node.left]), *node.comparators]
        empty = any(
            isinstance(side, ast.Constant) and side.value == ""
            for side in sides
        )
        return any(map(is_sentence, sides)) and not empty
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        arguments = node.args if name in SEARCHES else ()
        own = name in READS and is_sentence(node.func.value)
        lines = name == "split" and all(
            isinstance(one, ast.Constant) and one.value == "\n"
            for one in node.args
        )
        # highlight_regex searches printed text
        colours = name == "highlight_regex"
        return (
            (own and not lines) or colours or any(map(is_sentence, arguments))
        )
    return False


def readers(path, source):
    """Yield (path, function, line) of each expression that reads a
    sentence."""

    def walk(node, function):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = node.name
        if reads(node):
            yield path, function, node.lineno
        for inner in ast.iter_child_nodes(node):
            yield from walk(inner, function)

    yield from walk(ast.parse(source), "")


@pytest.mark.parametrize(
    "source",
    [
        "'no time' in result.message",
        "result.message == 'no time'",
        "str(error).endswith('packages')",
        "str(error).replace('a', 'b')",
        "way.says.removesuffix(' and position')",
        "[n for n in rows if n.note.startswith(('failed', 'error'))]",
        "LINE.findall(result.message)",
        "re.search('a', str(error))",
        "text.highlight_regex(STATUS)",
    ],
)
def test_a_reader_of_a_sentence_is_found(source):
    assert len([*readers("x.py", source)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        "print(result.message)",
        "' '.join(str(error).split())",
        "str(error).split('\\n')[0]",
        "if result.message: pass",
        "row.note == ''",
        "if case.words not in given: given.append(case.words)",
        "result.status.startswith('a')",
    ],
)
def test_printing_a_sentence_is_allowed(source):
    assert not [*readers("x.py", source)]


GONE = (  # former code that `readers` does not recognise
    "EITHER in first",
    'startswith(("failed", "error"))',
    'startswith("too noisy")',
    "ours in words",
    "LINE.findall(",
    'endswith("installed packages")',
    "how.removesuffix(",
    'name.endswith("before")',
    "beside == HIDES",
)


@pytest.mark.parametrize("words", GONE)
def test_code_that_read_sentences_does_not_return(words):
    assert not [file for file in sources() if words in file.read_text("utf-8")]


def test_no_code_reads_a_sentence_that_the_kit_wrote():
    found = []
    for file in sources():
        path = file.relative_to(ROOT).as_posix()
        found += readers(path, file.read_text("utf-8"))
    assert not [one for one in found if one[:2] not in OF_OTHERS]
    known = {one[:2] for one in found}
    assert not OF_OTHERS.keys() - known, "nothing there reads a text"
