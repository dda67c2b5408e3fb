"""One process at a time writes a run's folder."""

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
    """Hold a run's lock inside; Windows has no such lock.

    The system releases the lock of a process that ends in whatever way; its
    file is then left, and the next process says so.

    Raises:
        ValueError: if another process holds it.
    """
    if sys.platform == "win32":
        yield
        return
    path = folder / LOCK
    with _hold(path) as file:
        if before := file.read():
            warn(
                f"process {before} left {path} and is gone: its lock is taken "
                f"over"
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
                    f"process {file.read()} trains the run in {path.parent}: "
                    f"its lock is {path}"
                ) from None
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # its holder has just removed it
