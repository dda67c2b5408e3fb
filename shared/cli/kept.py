"""Store results of gpt-duet check for the next run.

A result is stored with a digest of everything that it depends on:

- the sources of the modules that were imported to build the target (for
  packages in site-packages, their versions);
- the state of the built model;
- the settings and the machine.

The next run builds the model, and uses the result if the digest is the same.
The digest does not include files or variables that a model reads only when it
is called. If one of these has changed, run with `--fresh`.
"""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from ..files import write_atomically
from ..importing import held_by, imported_files
from ..invariants.report import CheckResult, Report
from ..processes import several
from ..running.context import isolated
from ..running.model.building import is_factory
from ..running.program import Program
from ..validation import is_installed
from .job import Job

# folder of results in the current folder; safe to delete
FOLDER = ".gpt_duet_cache"
READ_BY_TORCH = ("CUDA", "MKL", "OMP", "PYTHON", "PYTORCH", "TORCH")
PLAIN = (int, float, complex, str, bytes, bool, type(None))
DEEPEST = 4  # most levels of nested objects whose contents are in the digest
Kept = tuple[str, Report]


@dataclass(frozen=True)
class Entry:
    """The file of a job's result, and the digest of what it depends on."""

    file: Path
    digest: str

    def find(self) -> Report | None:
        """Return the stored report, or None if its digest differs."""
        with suppress(OSError, msgspec.DecodeError):
            text = self.file.read_bytes()
            digest, report = msgspec.json.decode(text, type=Kept)
            return report if digest == self.digest else None
        return None

    def keep(self, report: Report) -> None:
        """Store a report if its checks are complete and none failed."""
        with suppress(OSError, ValueError):  # the folder may be read-only
            self.file.unlink(missing_ok=True)
            if report.ok and all(map(_is_whole, report.results)):
                self.file.parent.mkdir(exist_ok=True)
                ignore = self.file.with_name(".gitignore")
                write_atomically(ignore, "*\n")
                report = replace(report, kept=time.strftime("%Y-%m-%d %H:%M"))
                text = msgspec.json.encode((self.digest, report)).decode()
                write_atomically(self.file, text)


def entry_of(job: Job, factory: Callable[..., Any]) -> Entry | None:
    """Return where a job's result is stored; None if it must not be.

    Args:
        job: the target, and how to check it.
        factory: the loaded target.
    """
    device = job.settings.get("device", "cpu")
    if several() or job.map_file or job.scorer or device != "cpu":
        return None  # on an accelerator, whose driver is not in the digest
    if isinstance(factory, Program):
        return None  # a program may read files that the kit does not know
    facts = repr([job, os.getcwd()])
    name = hashlib.sha256(facts.encode()).hexdigest()[:16]
    digest = hashlib.sha256(facts.encode())
    try:
        with isolated(job.settings.get("seed", 0)):
            model = factory() if is_factory(factory) else factory
        for part in _state(model):
            digest.update(part)
    except Exception:  # check_model will report the exception
        return None
    for part in (*_sources(), *_versions()):
        digest.update(part)
    file = Path(FOLDER, f"{name}.json").absolute()
    return Entry(file, digest.hexdigest())


def _is_whole(result: CheckResult) -> bool:
    """Return whether a check tried all that it could, and found no fault."""
    part = result.not_tried or (result.proof or {}).get("left_out")
    return result.status in ("passed", "skipped") and not part


def _state(model: Any) -> Iterator[bytes]:
    """Yield the content of each tensor and attribute of a model."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    for name, part in parts:
        yield f"{name} {_name_of(type(part))}".encode()
        held = {k: v for k, v in vars(part).items() if k[:1] != "_"}
        yield from _content({**part._parameters, **part._buffers, **held})


def _content(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a value, such as a number or an object's content."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        flat = value.detach().cpu().contiguous().flatten()
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif isinstance(value, PLAIN):
        yield repr(value).encode()
    elif depth == DEEPEST or isinstance(value, nn.Module):
        yield _name_of(type(value)).encode()
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _content(one, depth + 1)
    else:
        yield _name_of(value if callable(value) else type(value)).encode()
        held = value if isinstance(value, dict) else vars(value)
        for key, one in held.items():
            yield str(key).encode()
            yield from _content(one, depth + 1)


def _name_of(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _sources() -> Iterator[bytes]:
    """Yield the imported source files, except those of installed packages."""
    held = (held_by(m, "__file__") for m in [*sys.modules.values()])
    files = {*imported_files, *filter(None, held)}
    library = os.path.dirname(os.__file__)
    for file in sorted(map(str, files)):
        inside = is_installed(file) or file.startswith(library)
        if not inside and os.path.isfile(file):
            yield file.encode()
            yield Path(file).read_bytes()


def _versions() -> Iterator[bytes]:
    """Yield the versions and variables on which a result depends."""
    packages = sorted(f"{d.name} {d.version}" for d in distributions())
    variables = [
        i for i in os.environ.items() if i[0].startswith(READ_BY_TORCH)
    ]
    facts = [packages, sys.version, platform.platform(), sorted(variables)]
    yield json.dumps(facts).encode()
