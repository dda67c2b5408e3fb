"""Work in a process of its own, which can be stopped."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from . import console

GRACE = 5.0  # seconds between the word to stop and the end of the process

Tell = Callable[[Any], None]


def several() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_alone(
    work: Callable[[Tell], Any],
    tell: Tell,
    name: str,
    module: str,
    seconds: float = math.inf,
) -> Any:
    """Return what work returns in a new process.

    So nothing that it sets for the whole process, and no memory that it
    takes, reaches what runs later. Where its time is over, and at Ctrl-C,
    KeyboardInterrupt is raised in it, and what it then returns counts. It is
    killed GRACE seconds after its time, and at a second Ctrl-C.

    Args:
        work: called there with a function whose argument `tell` gets here.
            It, what it tells and what it returns are plain data.
        tell: called here with what work tells.
        name: of the work, for a message.
        module: what the new process has imported from its start.
        seconds: after which it is stopped.

    Raises:
        ValueError: that of the work, also for its OSError and MemoryError,
            and where the process ends early.
        TimeoutError: where it was stopped by the clock, and returned nothing.
    """
    # forked from a process that has imported the module, and nothing else
    kind = "forkserver" if hasattr(os, "fork") else "spawn"
    context: Any = multiprocessing.get_context(kind)
    context.set_forkserver_preload([module])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_work, args=(work, theirs, console.debug), name=name
    )
    # Ctrl-C reaches all processes of a terminal: the new one ignores it, and
    # stops when this one says so
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    answer: Any = None
    stopped: BaseException | None = None
    ended, end = False, time.monotonic() + seconds
    try:
        while not ended:
            try:
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError(f"{name} took {seconds:.0f} s")
                if ours.poll(min(left, 60.0)):
                    answer, ended = ours.recv()
                    if not ended:
                        tell(answer)
            except (KeyboardInterrupt, TimeoutError) as error:
                if stopped:
                    raise stopped from None  # and it is killed
                process.terminate()
                stopped, end = error, end + GRACE
            except EOFError:
                process.join()
                if stopped:
                    raise stopped from None
                killed = " (too little memory?)" * (process.exitcode == -9)
                raise ValueError(
                    f"{name} ends its process with status "
                    f"{process.exitcode}{killed}, before a report"
                ) from None
    finally:
        if not ended:
            process.kill()
        process.join()
    if isinstance(answer, ValueError):
        raise answer
    return answer


def _work(work: Callable[[Tell], Any], pipe: Connection, debug: bool) -> None:
    """Do the work, and send what it tells and returns."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Thread(target=_end_with_parent, daemon=True).start()
    console.set_debug(debug)
    try:
        with console.own_warnings():
            answer = work(lambda told: pipe.send((told, False)))
    except (ValueError, OSError, MemoryError) as error:
        places = getattr(error, "places", ())
        answer = console.MistakeAt(str(error) or type(error).__name__, places)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send((answer, True))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
