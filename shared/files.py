"""Write files and folders completely or not at all."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

STDOUT = Path("-")
_reserved = ExitStack()  # its close restores the standard output


def reserve_stdout() -> None:
    """Send all output to stderr until `release_stdout` is called.

    This also affects child processes and libraries in C.
    """
    stream = sys.stdout
    _reserved.enter_context(redirect_stdout(sys.stderr))
    with suppress(OSError, ValueError):  # the stream may lack a file number
        number, stderr = stream.fileno(), sys.stderr.fileno()
        stream.flush()
        before = os.dup(number)
        os.dup2(stderr, number)
        _reserved.callback(os.close, before)
        _reserved.callback(os.dup2, before, number)


def release_stdout() -> None:
    """Restore the standard output."""
    _reserved.close()


def write_atomically(path: Path, content: str) -> None:
    """Write a UTF-8 text to a temporary file, then move it to the path.

    Raises:
        ValueError: if the file cannot be written; the old file then stays.
    """
    with replace_file(path) as beside:
        beside.write_text(content, encoding="utf-8", newline="\n")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, or print it if STDOUT is given; NaN becomes null."""
    text = json.dumps(content)
    finite = json.loads(text, parse_constant=lambda name: None)
    text = json.dumps(finite, indent=2)
    if path == STDOUT:
        release_stdout()
        print(text)
    else:
        write_atomically(path, text + "\n")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then move it to the given path.

    Raises:
        ValueError: if the file cannot be written; the old file then stays.
    """
    path = Path(os.path.realpath(path))  # for a link, the file that it names
    beside = _beside(path)
    try:
        yield beside
        os.replace(beside, path)
    except _not_written() as error:
        raise ValueError(f"cannot write {path}: {_reason(error)}") from None
    finally:
        beside.unlink(missing_ok=True)


def require_new_folder(path: Path) -> None:
    """Raise ValueError, before any work, if a folder cannot be created.

    The folder must be missing or empty, and its parent must exist and be
    writable.
    """
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"the folder {path} exists and is not empty")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists and is not a folder")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"there is no folder {parent}")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write in the folder {parent}")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; afterwards, rename it to the path.

    If an empty folder with that name exists, it is replaced.

    Raises:
        ValueError: as in `require_new_folder`, and for a full disk or an
            invalid name.
    """
    require_new_folder(path)
    beside = _beside(path)
    try:
        beside.mkdir()
        yield beside
        if path.is_dir():
            path.rmdir()  # Windows cannot replace even an empty folder
        os.replace(beside, path)
    except _not_written() as error:
        raise ValueError(
            f"cannot write the folder {path}: {_reason(error)}"
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _not_written() -> tuple[type[Exception], ...]:
    """Return the exceptions that are raised if a file cannot be written."""
    from safetensors import SafetensorError  # slow to import, so only here

    return OSError, SafetensorError


def _reason(error: Exception) -> str:
    """Return why a file could not be written."""
    return getattr(error, "strerror", None) or str(error)


def _beside(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f".{path.name}.{os.getpid()}")
