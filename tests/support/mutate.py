"""Change lines of the kit at random, and see whether a fast test fails.

    pytest -m "not slow" --cov --cov-report= --cov-context=test
    python tests/support/mutate.py --count 100 --seed 1 --jobs 2

The first command records in .coverage which tests reach a line. If a line runs
at import, all tests that import its module reach it.

The second command makes mutants: copies of the tree with one changed line. It
draws a line, and one of its changes: another operator, comparison, constant,
condition or order of arguments, or no statement. Then it runs all fast tests
that reach the line. A mutant is killed if a test fails, or if the tests take
too long only with the mutant. Changes that no test can see are in
equivalent_mutants.txt, each with a reason.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Queue

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
TIME = "time"
NOT_FOUND = 4  # pytest's exit status if a test does not exist
MANY = 300  # most tests that are named one by one
FOLDERS = ("annotated", "benchmarks", "mingpt_style", "shared")
# Words in the names of tests, for folders of the kit with other names.
ROOMS = {
    "annotated": "styles", "mingpt": "styles", "mingpt_style": "styles",
    "benchmarks": "bench", "invariants": "checks", "comparison": "diff",
    "tokenization": "text", "checkpoint": "text", "generation": "text",
    "training": "text", "values": "diff", "tracing": "diff",
    "parametrize": "invariants", "proving": "dependence",
}  # fmt: skip
SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of the text between two byte offsets in a file."""

    file: str
    first: int  # first line of the statement that is changed
    line: int
    start: int
    end: int
    kind: str
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {self.kind}: {old} -> {new}"

    def source(self) -> bytes:
        """Return the file with the change; other lines keep their numbers."""
        text = (ROOT / self.file).read_bytes()
        lines = text[self.start : self.end].count(b"\n")
        if self.kind == "left out":
            new = self.new + "\n" * lines
        else:
            new = f"({self.new}" + "\n" * lines + ")"
        return text[: self.start] + new.encode() + text[self.end :]


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yield each possible change of a file of the kit."""
    text = (ROOT / file).read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = 1
    for node in changeable(ast.parse(text)):
        if isinstance(node, ast.stmt):
            first = node.lineno
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = text[start:end].decode()
        for kind, new in changes(node):
            yield Mutant(file, first, node.lineno, start, end, kind, old, new)


def changeable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose change a test could see: no types, no f-strings.

    The argument `strict` of zip is left out, because the kit zips only lists
    of equal lengths.
    """
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "bases", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from changeable(child)


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the possible changes of a node, each as its kind and new text."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            if type(op) in SWAPPED:
                new.op = SWAPPED[type(op)]()
                yield "operator", ast.unparse(new)
        case ast.Compare(ops=[op, *_]):
            new.ops[0] = SWAPPED[type(op)]()
            yield "comparison", ast.unparse(new)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", repr(value + 1)
        case ast.Call(func=ast.Name("max" | "min")):
            pass  # the order of arguments does not matter
        case ast.Call(args=[first, second, *rest]):
            if not any(isinstance(a, ast.Starred) for a in new.args):
                new.args = [second, first, *rest]
                yield "arguments", ast.unparse(new)
        case ast.IfExp(body=body, orelse=orelse):
            new.body, new.orelse = orelse, body
            yield "branches", ast.unparse(new)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "left out", "pass"
        case ast.Continue() | ast.Break():
            yield "left out", "pass"
        case ast.Return(value=ast.Constant(value=None | False | "")):
            pass  # a change to "return None" would be false as well
        case ast.Return(value=ast.expr()):
            yield "left out", "return None"
        case ast.Assert():
            yield "left out", "pass"


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw mutants: a line, uniformly, and then one of its changes."""
    listed = EQUIVALENT.read_text("utf-8").splitlines()
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for mutant in mutants_of(path.relative_to(ROOT).as_posix()):
                by_line.setdefault((mutant.file, mutant.line), []).append(
                    mutant
                )
    generator = random.Random(seed)
    lines = generator.sample(sorted(by_line), len(by_line))
    found = (generator.choice(by_line[line]) for line in lines)
    kept = [mutant for mutant in found if str(mutant) not in listed]
    return kept[:count]


def module_of(file: str) -> str:
    """Return the name under which a file of the kit is imported."""
    folder, *parts = Path(file).with_suffix("").parts
    parts = parts if folder == "shared" else [folder, *parts]
    return ".".join(["gpt_duet", *parts]).removesuffix(".__init__")


@cache
def imports(file: Path) -> frozenset[str]:
    """Return the modules of the kit that a file imports."""
    inside = file.is_relative_to(ROOT / "tests")
    module = "" if inside else module_of(file.relative_to(ROOT).as_posix())
    package = file.name == "__init__.py"
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            up = len(parts) - node.level + package
            base = parts[:up] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            found |= {name, *(f"{name}.{a.name}" for a in node.names)}
    return frozenset(found)


@cache
def files_by_module() -> dict[str, Path]:
    """Return, by module, the kit's files and the files that tests share."""
    found = {
        module_of(path.relative_to(ROOT).as_posix()): path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    for folder in ("zoo", "oracle", "support"):
        for path in (ROOT / "tests" / folder).glob("*.py"):
            found[path.stem] = path
    return found


@cache
def steps_to(file: Path) -> dict[str, int]:
    """Return, for each module, how many imports lead to it from a file."""
    steps, ahead, count = {}, {file}, 0
    while ahead:
        count += 1
        names = set().union(*map(imports, ahead)) & files_by_module().keys()
        new = names - steps.keys()
        steps |= dict.fromkeys(new, count)
        ahead = {files_by_module()[name] for name in new}
    return steps


def words_of(file: str) -> set[str]:
    """Return the words of a path, and other words that name its tests."""
    parts = Path(file).with_suffix("").parts
    words = set("_".join(parts).removeprefix("shared_").split("_"))
    return words | set(" ".join(ROOMS.get(p, "") for p in parts).split())


def tests_of(file: str) -> list[str]:
    """Return the test files for a module, the most likely killers first.

    First come files whose names share words with the module's path, because
    the test of a command does not import its code. Then come files that import
    the module, those with the fewest imports first.
    """
    module, words = module_of(file), words_of(file)
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        steps = steps_to(path)
        common = len(words & words_of(name.removeprefix("tests/test_")))
        if module in steps or common:
            order = (-common, steps.get(module, 99), len(steps))
            found.append((order, name))
    return [name for _, name in sorted(found)]


def tests_that_reach(mutant: Mutant, reached: CoverageData) -> list[str]:
    """Return the tests that ran the mutated line, in the order of `tests_of`.

    If more than MANY tests ran it, return their files. If it ran at import or
    in a subprocess, return the files of all tests that import its module.
    """
    files, names = tests_of(mutant.file), set()
    for path in reached.measured_files():
        if path.endswith(f"/{mutant.file}"):
            lines = reached.contexts_by_lineno(path)
            for line in range(mutant.line, mutant.first - 1, -1):
                # a statement counts as run if one of its lines is recorded
                if line in lines:
                    names |= {name.partition("|")[0] for name in lines[line]}
                    break
    order = {file: number for number, file in enumerate(files)}
    found = sorted(
        names - {""},
        key=lambda name: (order.get(name.split("::")[0], len(order)), name),
    )
    if len(found) > MANY:
        found = [*dict.fromkeys(name.split("::")[0] for name in found)]
    return found or files


def copied(folder: Path) -> Path:
    """Copy the repository to a folder, with a link to its sibling `shared`."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    tree = folder / ROOT.name
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (sibling := ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(sibling)
    return tree


def killer(tree: Path, tests: list[str], seconds: float) -> str:
    """Return the first test that fails; TIME if tests take too long; or ""."""
    command = [sys.executable, "-m", "pytest", "-xq", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]
    run = subprocess.Popen(
        command, cwd=tree, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CI": "1", "PYTHONPATH": str(tree)},
    )  # fmt: skip
    try:
        out, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, 9)
        run.communicate()
        return TIME
    if run.returncode in (0, 5):
        return ""
    # if pytest does not find a row of a test, run the whole files
    if run.returncode == NOT_FOUND:
        files = [*dict.fromkeys(name.split("::")[0] for name in tests)]
        return (
            f"exit {NOT_FOUND}"
            if files == tests
            else killer(tree, files, seconds)
        )
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", out, re.M)
    return found[0] if found else f"exit {run.returncode}"


def tried(
    mutant: Mutant, trees: Queue[Path], tests: list[str], seconds: float
) -> str:
    """Test a mutant in a free tree; return the test that kills it, or ""."""
    tree = trees.get()
    target = tree / mutant.file
    target.write_bytes(mutant.source())
    by = killer(tree, tests, seconds) if tests else ""
    shutil.copy2(ROOT / mutant.file, target)
    if by == TIME and killer(tree, tests, seconds) == TIME:
        by = ""  # no kill: the tests take as long without the change
    trees.put(tree)
    said = f"killed by {by}" if by else "SURVIVED"
    print(f"{said}: {mutant.file}:{mutant.line} | {mutant}", flush=True)
    return by


def main() -> None:
    """Draw mutants, run tests on each, and print the share that is killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--reached", default=str(ROOT / ".coverage"))
    given = parser.parse_args()
    mutants = drawn(given.skip + given.count, given.seed)[given.skip :]
    reached = CoverageData(given.reached)
    reached.read()
    tests = [tests_that_reach(mutant, reached) for mutant in mutants]
    trees: Queue[Path] = Queue()
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        for number in range(given.jobs):
            (Path(folder) / str(number)).mkdir()
            trees.put(copied(Path(folder) / str(number)))
        found = pool.map(
            lambda pair: tried(pair[0], trees, pair[1], given.seconds),
            zip(mutants, tests, strict=True),
        )
        killed = sum(map(bool, found))
    print(f"killed {killed} of {len(mutants)} (seed {given.seed})")


if __name__ == "__main__":
    main()
