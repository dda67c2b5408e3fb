"""Results of gpt-duet check that are kept for the next run.

A target is watched while it is loaded, built and checked. The next run takes
the result if all is as it was: each file that Python opened or asked for, by
its content, the modules beside these, and each variable of the environment
that was read. Nothing is kept where that would not be all: where a folder is
listed, a file written, a process started, the network asked, or native code
of other packages loaded, which may open files unseen. The clock and
`torch.from_file` are not seen.
"""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..invariants.report import CheckResult, Report

FOLDER = ".gpt_duet_cache"  # in the current one; safe to remove
# options that change what is printed or written, and no result
OF_OUTPUT = {"models", "--json", "--format", "--verbose", "--quiet"}
OF_OUTPUT |= {"--fresh", "--debug"}
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
Asked = dict[str, Any]  # a target and its settings, as data of JSON


@dataclass
class Seen:
    """The files and variables that a target's run has read."""

    paths: set[str] = field(default_factory=set)  # also of what is not there
    names: set[str] = field(default_factory=set)  # of variables
    unknown: str = ""  # an event after which not all is known

    def path(self, path: Any) -> None:
        """Note a file that is opened, or asked for; of a module its source."""
        with suppress(TypeError, OSError):  # the number of an open file
            text = os.path.abspath(os.fsdecode(path))
            with suppress(ValueError):  # no compiled file
                text = source_from_cache(text)
            self.paths.add(text)


class _Environment(type(os.environ)):  # type: ignore[misc]
    def __getitem__(self, name: str) -> str:
        if _seen is not None:
            _seen.names.add(name)
        return super().__getitem__(name)


_seen: Seen | None = None  # while a target is watched


@cache  # once: a hook cannot be taken away
def _listen() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, given: tuple[Any, ...]) -> None:
    """Note what an audit event of Python's says."""
    if _seen is None:
        return
    known = not event.startswith(UNKNOWN)
    if event == "open":
        _seen.path(given[0])
        known = not given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    elif event == "import" and given[1] is not None:
        known = given[0].partition(".")[0] in NATIVE
    if not known:
        # Python itself lists folders, and writes what it has compiled
        caller = sys._getframe(1).f_code.co_filename
        if event == "import" or not caller.startswith("<frozen importlib"):
            _seen.unknown = f"{event} {given}"


@contextmanager
def watched(asked: Asked) -> Iterator[Seen]:
    """Watch what this process reads inside; an older result goes."""
    global _seen
    with suppress(OSError):
        _file(asked).unlink(missing_ok=True)
    _listen()
    seen, kind, real = Seen(), type(os.environ), os.stat

    def noting(path: Any, *how: Any, **named: Any) -> os.stat_result:
        seen.path(path)
        return real(path, *how, **named)

    _seen, os.stat = seen, noting
    os.environ.__class__ = _Environment
    try:
        yield seen
    finally:
        _seen, os.stat = None, real
        os.environ.__class__ = kind
        for file in {
            getattr(m, "__file__", 0) for m in [*sys.modules.values()]
        }:
            if isinstance(file, str) and os.path.isabs(file):
                seen.path(file)


def ask(
    target: str, given: Mapping[str, Any], own: Mapping[str, Any]
) -> Asked | None:
    """Return what is asked about a target; None: its result is not kept.

    Args:
        target: its name.
        given: the options of the shell.
        own: the target's settings in pyproject.toml.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = given.get("--device", own.get("device", "cpu"))
    if several or "--map" in given or device != "cpu":
        return None  # an accelerator has a driver
    return {
        "target": target,
        "given": {k: v for k, v in given.items() if k not in OF_OUTPUT},
        "own": own,
        "folder": os.getcwd(),
        "python": [sys.version, *sys.flags, *sys.path, platform.platform()],
    }


def find(asked: Asked | None) -> Report | None:
    """Return a report that was kept, if all is as it was in its run."""
    if asked is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(_file(asked).read_text("utf-8"))
        if entry["state"] == _state(asked, entry["paths"], entry["names"]):
            report = entry["report"]
            report["results"] = [CheckResult(**r) for r in report["results"]]
            return Report(**report)
    return None


def keep(asked: Asked, report: Report, seen: Seen) -> None:
    """Keep a report whose checks ran whole, and none of them failed."""
    paths, names = sorted(seen.paths), sorted(seen.names)
    # a file that was changed since the start may be another than was read
    files = [os.stat(path) for path in paths if os.path.isfile(path)]
    changed = any(max(f.st_mtime, f.st_ctime) >= START for f in files)
    whole = report.ok and all(map(_whole, report.results))
    if not whole or seen.unknown or changed:
        return
    kept = asdict(report) | {"kept": time.strftime("%Y-%m-%d %H:%M")}
    entry = {"state": _state(asked, paths, names), "report": kept}
    file = _file(asked)
    with suppress(OSError, ValueError):  # a folder that cannot be written
        file.parent.mkdir(exist_ok=True)
        write_atomically(file.with_name(".gitignore"), "*\n")
        entry |= {"paths": paths, "names": names}
        write_atomically(file, json.dumps(entry))


def _whole(result: CheckResult) -> bool:
    """Whether a check has tried all that it has to try, and found no fault."""
    part = result.not_tried or (result.proof or {}).get("left_out")
    good = result.status in ("passed", "skipped") and not part
    return good and "no time" not in result.message


def _file(asked: Asked) -> Path:
    text = repr([asked["target"], asked["given"]])
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(asked["folder"], FOLDER, f"{name}.json")


def _state(asked: Asked, paths: list[str], names: list[str]) -> str:
    """Return a digest of what a run is asked and reads, as it is now."""
    unseen = [n for n in os.environ if n.startswith(READ_UNSEEN)]
    facts: list[Any] = [asked, paths]
    facts += [(n, os.environ.get(n)) for n in sorted({*names, *unseen})]
    facts += map(_content, paths)
    folders = {asked["folder"], *map(os.path.dirname, paths)}
    facts += map(_modules, sorted(folders))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _content(path: str) -> str:
    with suppress(OSError):
        if os.path.isfile(path):
            facts = os.stat(path)
            times = facts.st_mtime_ns, facts.st_ctime_ns
            return _digest(path, facts.st_ino, facts.st_size, *times)
    return f"there: {os.path.exists(path)}"


@cache  # targets share most of their files
def _digest(path: str, *facts: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _modules(folder: str) -> list[str]:
    """Return the names in a folder that an import may find."""
    with suppress(OSError):
        names = {*os.listdir(folder)} - {"__pycache__"}
        ends = (".py", ".so", ".pyd")
        return sorted(n for n in names if n.isidentifier() or n.endswith(ends))
    return []
