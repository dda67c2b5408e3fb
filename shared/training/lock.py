"""Let only one process at a time write the folder of a run."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..console import warn

if sys.platform != "win32":
    import fcntl

LOCK = "lock"  # the file with the id of the process that trains


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's lock in the body of `with`; on Windows, do nothing.

    The system releases the lock when its process ends, even if it is killed.
    If that process left the file behind, the next one prints a warning.

    Raises:
        ValueError: if another process holds the lock.
    """
    if sys.platform == "win32":
        yield
        return
    path = folder / LOCK
    with _hold(path) as file:
        if before := file.read():
            warn(
                f"process {before} ended without removing {path}: taking over "
                f"its lock"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _hold(path: Path) -> TextIO:
    while True:
        file = path.open("a+", errors="replace")
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise ValueError(
                    f"process {file.read()} is training the run in "
                    f"{path.parent}: its lock is {path}"
                ) from None
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # the holder has removed the file meanwhile: try again
