"""Results of gpt-duet check that are kept for the next run.

A target is watched while it is loaded, built and checked: which files Python
opens or asks for, and which variables of the environment it reads. The next
run takes the result if each of these is as it was, and each folder of these
files has the same modules. Nothing is kept where that would not be all:
where a folder is listed, a file written, a process started, the network
asked, or native code of other packages loaded, which may open files unseen.
The clock and `torch.from_file` are not seen.
"""

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

import msgspec

from ..files import write_atomically
from ..invariants.report import CheckResult, Report
from ..processes import several
from .job import Job

FOLDER = ".gpt_duet_cache"  # in the current one; safe to remove
START = time.time()  # of this process, or of the one it is forked from
# audit events after which not all is known
UNKNOWN = (
    "os.listdir", "os.scandir", "glob.", "os.system", "os.exec", "os.fork",
    "os.posix_spawn", "subprocess.", "socket.", "ctypes.dlopen", "sqlite3.",
    "os.remove", "os.rename", "os.mkdir", "os.rmdir",
)  # fmt: skip
# packages whose native code opens no file of the user's
NATIVE = {*sys.stdlib_module_names, "torch", "numpy"}
# variables that native code reads
READ_UNSEEN = ("CUDA", "MKL", "OMP", "PYTHON", "PYTORCH", "TORCH")
Read = set[tuple[str, str]]  # a kind of ANSWERS and a name, or "unknown"
Kept = tuple[list[tuple[str, str, Any]], Report]  # each with its answer

_read: Read | None = None  # while a target is watched


def entry_of(job: Job) -> Path | None:
    """Return the file that keeps a job's result; None: it is not kept."""
    device = job.settings.get("device", "cpu")
    if several() or job.map_file is not None or device != "cpu":
        return None  # an accelerator has a driver
    unseen = [i for i in os.environ.items() if i[0].startswith(READ_UNSEEN)]
    facts = [job, os.getcwd(), sys.version, sys.flags, sys.path]
    text = repr([*facts, platform.platform(), sorted(unseen)])
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(FOLDER, f"{name}.json").absolute()


def find(entry: Path | None) -> Report | None:
    """Return a report that was kept, if all is as it was in its run."""
    if entry is None:
        return None
    with suppress(OSError, msgspec.DecodeError):
        read, report = msgspec.json.decode(entry.read_bytes(), type=Kept)
        if all(ANSWERS[kind](name) == was for kind, name, was in read):
            return report
    return None


def run(entry: Path, check: Callable[[], Report]) -> Report:
    """Check a target, and keep its report; an older one goes.

    A report is kept if its checks ran whole and none failed, and if all that
    this process has read meanwhile is known.
    """
    global _read
    with suppress(OSError):
        entry.unlink(missing_ok=True)
    sys.addaudithook(_hook)  # for good: a hook cannot be taken away
    real, follow, plain = os.stat, os.readlink, type(os.environ)

    def stat(path: Any, *how: Any, **named: Any) -> os.stat_result:
        _note_file(path)
        return real(path, *how, **named)

    def readlink(path: Any, **named: Any) -> Any:
        read.add(("link", os.path.abspath(os.fsdecode(path))))
        return follow(path, **named)

    read: Read = set()
    _read = read
    os.stat, os.readlink = stat, readlink
    os.environ.__class__ = _Environment
    try:
        report = check()
        for module in [*sys.modules.values()]:
            _note_file(getattr(module, "__file__", None))
    finally:
        _read = None
        os.stat, os.readlink = real, follow
        os.environ.__class__ = plain
    files = [name for kind, name in read if kind == "file"]
    folders = {os.getcwd(), *map(os.path.dirname, files)}
    read |= {("modules", folder) for folder in folders}
    # a file that was changed since the start may be another than was read
    facts = [os.stat(file) for file in files if os.path.isfile(file)]
    changed = any(max(f.st_mtime, f.st_ctime) >= START for f in facts)
    known = not changed and all(kind in ANSWERS for kind, _ in read)
    if known and report.ok and all(map(_whole, report.results)):
        with suppress(OSError, ValueError):  # a folder that cannot be written
            entry.parent.mkdir(exist_ok=True)
            write_atomically(entry.with_name(".gitignore"), "*\n")
            answers = [(kind, n, ANSWERS[kind](n)) for kind, n in read]
            kept = replace(report, kept=time.strftime("%Y-%m-%d %H:%M"))
            text = msgspec.json.encode((answers, kept)).decode()
            write_atomically(entry, text)
    return report


def _whole(result: CheckResult) -> bool:
    """Whether a check has tried all that it has to try, and found no fault."""
    part = result.not_tried or (result.proof or {}).get("left_out")
    good = result.status in ("passed", "skipped") and not part
    return good and "no time" not in result.message


def _note_file(path: Any) -> None:
    """Note a file that is opened, or asked for; of a module its source."""
    with suppress(TypeError, OSError):  # the number of an open file
        text = os.path.abspath(os.fsdecode(path))
        with suppress(ValueError):  # no compiled file
            text = source_from_cache(text)
        if _read is not None:
            _read.add(("file", text))


class _Environment(type(os.environ)):  # type: ignore[misc]
    def __getitem__(self, name: str) -> str:
        if _read is not None:
            _read.add(("variable", name))
        return super().__getitem__(name)


def _hook(event: str, given: tuple[Any, ...]) -> None:
    """Note what an audit event of Python's says."""
    if _read is None:
        return
    known = not event.startswith(UNKNOWN)
    if event == "open":
        _note_file(given[0])
        known = not given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    elif event == "import" and given[1] is not None:
        known = given[0].partition(".")[0] in NATIVE
    if not known:
        # Python itself lists folders, and writes what it has compiled
        caller = sys._getframe(1).f_code.co_filename
        if event == "import" or not caller.startswith("<frozen importlib"):
            _read.add(("unknown", f"{event} {given}"))


def _content(path: str) -> str | bool:
    """Return a file's digest, or whether there is anything else."""
    if not os.path.isfile(path):
        return os.path.exists(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _modules(folder: str) -> list[str]:
    """Return the names in a folder that an import may find."""
    names = [*os.listdir(folder)] if os.path.isdir(folder) else []
    ends = (".py", ".so", ".pyd")
    own = [n for n in names if n.isidentifier() or n.endswith(ends)]
    return sorted({*own} - {"__pycache__"})


ANSWERS: dict[str, Callable[[str], Any]] = {
    "file": _content,
    "link": os.readlink,
    "variable": os.environ.get,
    "modules": _modules,
}
