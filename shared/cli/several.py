"""Run a command in each of the processes that torchrun started.

All processes run the command together, but only rank 0 prints. If a process
waits too long for another process, it ends.
"""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import (
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from threading import Thread, main_thread
from time import perf_counter, sleep
from typing import NoReturn

import torch

from ..console import printable
from ..running.errors import is_theirs
from ..running.ranks import Parted, RankLost, Ranks, current, joined
from ..training.processes import join_processes, own_device

LATE = 45.0  # seconds after which a rank without a new step is late
# seconds after which a rank is late while the model is loaded
LATE_AT_FIRST = 600.0
TIMES_LONGEST = 20  # a rank is late only after so many times the longest step
GRACE = 3.0  # seconds that a command has to report why it ends


@contextmanager
def all_processes(device: str) -> Iterator[None]:
    """Run the body in all processes, which then act together as ranks."""
    here = own_device(torch.device(device))
    with join_processes(here), joined():
        ranks = current()
        assert ranks is not None
        watch = Watch(ranks)
        with ExitStack() as stack:
            if ranks.rank > 0:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            try:
                yield
            except Parted as parted:
                raise ValueError(str(parted)) from None
            except ValueError:
                if ranks.rank > 0:  # rank 0 will report it
                    raise SystemExit(2) from None
                raise
            finally:
                sys.stdout.flush()
                # wait before failing, because the launcher then stops all
                # processes
                if not isinstance(sys.exception(), RankLost):
                    with suppress(RankLost):
                        ranks.finish("the command", "")
                watch.ranks = None


class Watch:
    """Ends a process that waits too long, and says where it waits."""

    def __init__(self, ranks: Ranks):
        self.ranks: Ranks | None = ranks
        self.stderr = sys.stderr
        self.told, told = os.pipe()
        os.set_blocking(told, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (ranks := self.ranks) is not None:
            ready = select.select([self.told], [], [], 1.0)[0]
            if ready and signal.SIGTERM in os.read(self.told, 64):
                sleep(GRACE)
                self._end(ranks, "was stopped as another rank ended,")
            first = ranks.stage == "the start"
            late = perf_counter() - ranks.since
            if late > max(
                LATE_AT_FIRST if first else LATE, TIMES_LONGEST * ranks.longest
            ):
                self._end(ranks, f"has waited for {late:.0f} s")

    def _end(self, ranks: Ranks, what: str) -> NoReturn:
        text = f"rank {ranks.rank} {what} in {ranks.stage}"
        print(
            f"gpt-duet: {printable(text)}{_where()}",
            file=self.stderr,
            flush=True,
        )
        os._exit(2)


def _where() -> str:
    """Return the line of the user's code at which the process is."""
    frame = sys._current_frames().get(main_thread().ident or 0)
    while frame is not None and not is_theirs(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f", at {frame.f_code.co_filename}, line {frame.f_lineno}"
