"""Run work in a separate process, which can be stopped."""

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

GRACE = 5.0  # seconds from the request to stop until the process is killed

Tell = Callable[[Any], None]


def several() -> bool:
    """Return whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_alone(
    work: Callable[[Tell], Any],
    tell: Tell,
    name: str,
    module: str,
    seconds: float = math.inf,
) -> Any:
    """Run work in a new process, and return its result.

    Later work is affected neither by settings that the work changes nor by
    memory that it uses. When the time is over, or on Ctrl-C, KeyboardInterrupt
    is raised in the new process, which may still return a result. The process
    is killed GRACE seconds later, or on a second Ctrl-C.

    Args:
        work: runs in the new process. It gets a function, which passes its
            argument on to `tell`. The work, these arguments and the result
            must be plain data.
        tell: called in this process with what the work passes on.
        name: name of the work, for messages.
        module: a module that the new process imports at its start.
        seconds: time after which the work is stopped.

    Raises:
        ValueError: if the work raises ValueError, OSError or MemoryError, or
            if its process ends early.
        TimeoutError: if the time is over and the work returned no result.
    """
    process, pipe = _start(work, name, module)
    try:
        answer = _answer_of(process, pipe, tell, seconds)
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    if isinstance(answer, ValueError):
        raise answer
    return answer


def _start(
    work: Callable[[Tell], Any], name: str, module: str
) -> tuple[Any, Connection]:
    """Start a process; return it, and the pipe for its messages."""
    # forkserver: fork from a process that has imported only `module`
    kind = "forkserver" if hasattr(os, "fork") else "spawn"
    context: Any = multiprocessing.get_context(kind)
    context.set_forkserver_preload([module])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_work, args=(work, theirs, console.debug), name=name
    )
    # Ctrl-C reaches all processes of a terminal: the new process ignores it,
    # and stops only when this process requests it
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    return process, ours


def _answer_of(
    process: Any, pipe: Connection, tell: Tell, seconds: float
) -> Any:
    """Pass on a process's messages, and return its result.

    The process is asked to stop when time is over or on Ctrl-C.
    """
    name, end = process.name, time.monotonic() + seconds
    stopped: BaseException | None = None
    while True:
        try:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"{name} took {seconds:.0f} s")
            if pipe.poll(min(left, 60.0)):
                answer, ended = pipe.recv()
                if ended:
                    return answer
                tell(answer)
        except (KeyboardInterrupt, TimeoutError) as error:
            if stopped:
                raise stopped from None  # then the caller kills the process
            process.terminate()
            stopped, end = error, end + GRACE
        except EOFError:
            process.join()
            if stopped:
                raise stopped from None
            killed = " (too little memory?)" * (process.exitcode == -9)
            raise ValueError(
                f"{name} ended its process with status "
                f"{process.exitcode}{killed}, before a report"
            ) from None


def _work(work: Callable[[Tell], Any], pipe: Connection, debug: bool) -> None:
    """Do the work in this new process; send its messages and its result."""
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
