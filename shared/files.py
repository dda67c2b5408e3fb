"""Files that are written whole or not at all."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

STDOUT = Path("-")
_reserved = ExitStack()  # puts the standard output back where it was


def reserve_stdout() -> None:
    """Send all that is printed from now on to stderr, until write_json.

    That holds for other processes and libraries below Python as well.
    """
    stream = sys.stdout
    _reserved.enter_context(redirect_stdout(sys.stderr))
    with suppress(OSError, ValueError):  # a stream of Python's own
        number, stderr = stream.fileno(), sys.stderr.fileno()
        stream.flush()
        before = os.dup(number)
        os.dup2(stderr, number)
        _reserved.callback(os.close, before)
        _reserved.callback(os.dup2, before, number)


def release_stdout() -> None:
    """Put the standard output back where it was."""
    _reserved.close()


def write_atomically(path: Path, content: str) -> None:
    """Write a text in UTF-8 next to the file, then put it in its place.

    Raises:
        ValueError: where it cannot be written; the old one is then as it was.
    """
    with replace_file(path) as beside:
        beside.write_text(content, encoding="utf-8", newline="\n")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, or to STDOUT; NaN becomes null."""
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
    """Give a path to write to, which takes the file's place once written.

    Raises:
        ValueError: where it cannot be written; the old one is then as it was.
    """
    path = Path(os.path.realpath(path))  # a link stays, its file changes
    beside = _beside(path)
    try:
        yield beside
        os.replace(beside, path)
    except _not_written() as error:
        raise ValueError(f"cannot write {path}: {_reason(error)}") from None
    finally:
        beside.unlink(missing_ok=True)


def require_new_folder(path: Path) -> None:
    """Refuse a folder that cannot be made, before any work is done.

    Something may be in the way, or the folder above may be missing or closed.
    """
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"the folder {path} exists and is not empty")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists and is no folder")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"there is no folder {parent}")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write in the folder {parent}")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill, which gets its name once all is written.

    An empty folder of that name may be there already.

    Raises:
        ValueError: as `require_new_folder`, and for a full disk, or a name
            that cannot be given.
    """
    require_new_folder(path)
    beside = _beside(path)
    try:
        beside.mkdir()
        yield beside
        if path.is_dir():
            path.rmdir()  # Windows puts no folder instead of another
        os.replace(beside, path)
    except _not_written() as error:
        raise ValueError(
            f"cannot write the folder {path}: {_reason(error)}"
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _not_written() -> tuple[type[Exception], ...]:
    """Return what a file that cannot be written raises."""
    from safetensors import SafetensorError  # late: most commands have none

    return OSError, SafetensorError


def _reason(error: Exception) -> str:
    """Return why a file could not be written."""
    return getattr(error, "strerror", None) or str(error)


def _beside(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f".{path.name}.{os.getpid()}")
