"""Run a program in any language as a model: a line of ids in, scores out.

`ExecProgram` speaks the protocol of docs/how-to/any_language.md to a `Child`,
the running process. Reads from a child have a time limit, and its standard
error is passed on. The child ends when the kit ends, for any reason.
"""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, Timer
from time import monotonic
from typing import IO

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from .program import Program, ProgramFailed, Refused

# seconds for an answer; the environment variable LIMIT_VARIABLE replaces both
CALL_SECONDS = 10.0
START_SECONDS = 60.0  # seconds for the first answer, while weights are loaded
LIMIT_VARIABLE = "GPT_DUET_EXEC_SECONDS"
# after so many hangs and mismatched answers, no further call is made
MOST_BROKEN_ANSWERS = 3
MOST_STARTS = 64  # most starts of a program that dies instead of refusing ids
LAST_LINES = 3  # lines of the standard error that a failure shows
SHOWN_CHARACTERS = 60  # characters of an unreadable line in a failure
END_SECONDS = 0.5  # seconds for a program to exit at the end of its input
CHUNK_BYTES = 1 << 20
PIPE_BYTES = 1 << 12  # writing a line shorter than this never blocks
ENOUGH_DIGITS = 7  # printed digits that a float32 needs

WORDS = {"cache", "dump", "binary", "vocab_size", "block_size"}
RUNS = re.compile("python|pypy|node|deno|bun|ruby|java|julia|lua|perl|go$")
NUMBER = re.compile(r"-?(\d*)\.?(\d*)(?:[eE]([-+]?\d+))?$")


class Child:
    """A running process that gets requests, and must answer in time."""

    def __init__(self, command: Sequence[str]):
        posix = os.name == "posix"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=posix,
        )
        self.last_lines = deque[str](maxlen=LAST_LINES)
        self._chunks = SimpleQueue[bytes]()
        self._buffer, self._ended = bytearray(), False
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        self._reader = Thread(target=_read, args=(out, self._chunks))
        self._passer = Thread(target=_pass_on, args=(err, self.last_lines))
        for thread in (self._reader, self._passer):
            thread.daemon = True
            thread.start()
        guard = _guard(self.process.pid) if posix else None
        self.end = weakref.finalize(self, _end, self.process, guard)

    def send(self, line: str, deadline: float) -> None:
        """Write a line; kill the program if it does not read in time."""
        data, pipe = f"{line}\n".encode(), self.process.stdin
        assert pipe is not None
        # kill instead of `end`, which closes the pipe and would wait for the
        # write
        late = Timer(deadline - monotonic(), _kill, (self.process,))
        if len(data) > PIPE_BYTES:
            late.start()
        # a failed write shows as a missing answer
        with suppress(OSError, ValueError):
            pipe.write(data)
            pipe.flush()
        late.cancel()

    def line(self, deadline: float) -> str | None:
        """Return the next line, None at the end of the output."""
        searched = 0
        while (at := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if not self._more(deadline):
                return None
        return self._take(at + 1).decode("utf-8", "replace").rstrip("\r\n")

    def exactly(self, count: int, deadline: float) -> bytes | None:
        """Return exactly `count` bytes, None if the output ends earlier."""
        while len(self._buffer) < count:
            if not self._more(deadline):
                return None
        return self._take(count)

    def unread(self) -> str:
        """Return the output that the process has sent without a request."""
        with suppress(Empty):
            while True:
                self._buffer += self._chunks.get_nowait()
        return self._buffer.decode("utf-8", "replace")

    def how_it_ended(self) -> str:
        """Return the exit status of a process in words."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self._passer.join(END_SECONDS)
        status = self.process.poll()
        if status is None:
            return "closed its standard output"
        if status < 0:
            with suppress(ValueError):
                return f"was ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _more(self, deadline: float) -> bool:
        """Wait for more output; return False at its end.

        Raises:
            TimeoutError: at the deadline.
        """
        if self._ended:
            return False
        try:
            chunk = self._chunks.get(timeout=max(deadline - monotonic(), 0))
        except Empty:
            raise TimeoutError from None
        self._buffer += chunk
        self._ended = not chunk
        return not self._ended


def _read(pipe: IO[bytes], chunks: "SimpleQueue[bytes]") -> None:
    """Put all output of a process into a queue, then an empty chunk."""
    chunk = b"more"
    with pipe:
        while chunk:
            try:
                chunk = os.read(pipe.fileno(), CHUNK_BYTES)
            except OSError:
                chunk = b""
            chunks.put(chunk)


def _pass_on(pipe: IO[bytes], last_lines: "deque[str]") -> None:
    """Copy the standard error of a process to ours; keep the last lines."""
    with pipe, suppress(OSError, ValueError):
        for line in pipe:
            text = line.decode("utf-8", "replace")
            last_lines.append(text.strip())
            sys.stderr.write(text)
            sys.stderr.flush()


def _guard(group: int) -> "subprocess.Popen[bytes] | None":
    """Start a shell that ends a process group when this process ends.

    The shell reads a pipe to which only this process can write. So the pipe
    closes even if the kit is killed.
    """
    with suppress(OSError):
        return subprocess.Popen(
            ["/bin/sh", "-c", f"read line; kill -KILL -{group}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return None


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process, if it runs, and all processes that it has started."""
    with suppress(OSError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _end(
    process: "subprocess.Popen[bytes]",
    guard: "subprocess.Popen[bytes] | None",
) -> None:
    """End a process and all processes that it has started."""
    if process.stdin is not None:
        with suppress(OSError, ValueError):
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    _kill(process)
    process.wait()
    if guard is not None:
        guard.kill()
        guard.communicate()


class ExecProgram(Program):
    """A program that a command starts, and that answers lines of ids.

    The program is started once, at the first call or by `started`. If it dies,
    the next call starts it again.

    Args:
        command: the words of a shell command, without a shell's operators.
        vocab_size: number of scores at a position; None means as many as the
            program returns for one id.
    """

    def __init__(self, command: str, vocab_size: int | None = None):
        try:
            self._command = shlex.split(command, posix=os.name == "posix")
        except ValueError as error:
            raise ValueError(f"exec:{command}: {error}") from None
        if not self._command:
            raise ValueError("exec: needs a command, as exec:./my_gpt")
        self.__name__ = _name_of(self._command)
        self.vocab_size = self._given = vocab_size
        self._binary = False
        self._child: Child | None = None
        self._starts = self._broken = 0
        self._asked_before = 0  # how many numbers the last line asked for
        # whether the printed digits of the next answers are counted
        self._measures = False
        self._failure = ""  # why no further call is made, or ""
        said = _limit()
        self._seconds = said or CALL_SECONDS
        self._start_seconds = said or START_SECONDS

    def __call__(self, ids: Int[Tensor, "*rows time"]) -> np.ndarray:
        """Return the scores of a text (time,), or of several texts in turn."""
        if ids.ndim == 2:
            return np.stack([self(row) for row in ids])
        return self._ask("", ids.tolist())

    def reset(self) -> None:
        """Empty the program's cache, so that a new text can begin."""
        self._running().send("reset", self._deadline())

    def feed(self, ids: Int[Tensor, "time"]) -> Float[np.ndarray, "time v"]:
        """Return the scores of ids that continue the text in the cache."""
        return self._ask("feed ", ids.tolist())

    def dump(self, ids: Int[Tensor, "time"]) -> dict[str, np.ndarray]:
        """Return the arrays that the program computes for a text, in order."""
        asked, child = ids.tolist(), self._running()
        # a dump may take as long as a start
        deadline = monotonic() + self._start_seconds
        found, self._measures = dict[str, np.ndarray](), True
        child.send(f"dump {' '.join(map(str, asked))}", deadline)
        while (line := self._line(asked, deadline)) != "end":
            word, _, rest = line.partition(" ")
            name, _, sizes = rest.rpartition(" ")
            if word != "array" or not re.fullmatch(r"\d+(x\d+)*", sizes):
                raise self._out_of_step(
                    f"wrote {_shown(line)} where a line as 'array NAME 4x16' "
                    f"or 'end' was expected"
                )
            shape = tuple(map(int, sizes.split("x")))
            numbers = self._numbers(asked, deadline)
            if numbers.size != math.prod(shape):
                raise self._out_of_step(
                    f"wrote {numbers.size} numbers of {name}, and not {sizes}"
                )
            found[name.replace("_", " ")] = numbers.reshape(shape)
        return found

    def started(self) -> "ExecProgram":
        """Start the program, and return it once it has answered an id.

        Raises:
            ValueError: in one line, if it cannot be started, ends, hangs or
                gives an unreadable answer.
        """
        try:
            self._running()
        except (ProgramFailed, Refused) as error:
            raise ValueError(str(error)) from None
        return self

    def end(self) -> None:
        """End the program; a later call starts it again."""
        if self._child is not None:
            self._child.end()
            self._child = None

    # --- the protocol -------------------------------------------------------

    def _ask(self, word: str, ids: list[int]) -> Float[np.ndarray, "time v"]:
        """Send a line of ids, and return the scores that answer it."""
        child, deadline = self._running(), self._deadline()
        self._measures = False
        if extra := child.unread():
            raise self._out_of_step(
                f"wrote {_shown(extra)} that no line of ids asked for"
            )
        child.send(f"{word}{' '.join(map(str, ids))}", deadline)
        return self._fitting(self._numbers(ids, deadline), ids)

    def _fitting(
        self, numbers: Float[np.ndarray, "count"], ids: list[int]
    ) -> Float[np.ndarray, "time v"]:
        """Return the numbers of an answer as rows, a row for each id."""
        time, vocab = len(ids), self.vocab_size or numbers.size
        before, self._asked_before = self._asked_before, time * vocab
        if numbers.size != time * vocab or not vocab:
            late = ", as many as the line before asked for: is it a line late?"
            raise self._out_of_step(
                f"answered {_ids(time)} with {numbers.size} numbers"
                f"{late if numbers.size == before else ''}; {time} x {vocab} "
                f"= {time * vocab} were expected"
            )
        self.vocab_size = vocab
        return numbers.reshape(time, vocab)

    def _numbers(
        self, ids: list[int], deadline: float
    ) -> Float[np.ndarray, "count"]:
        """Return the numbers of an answer, from text or bytes."""
        if self._binary:
            size = self._bytes(ids, 4, deadline)
            count = int.from_bytes(size, "little")
            data = self._bytes(ids, 4 * count, deadline)
            return np.frombuffer(data, "<f4").astype(np.float32)
        return self._parsed(self._line(ids, deadline), ids)

    def _parsed(self, line: str, ids: list[int]) -> Float[np.ndarray, "count"]:
        word, _, rest = line.partition(" ")
        if word == "error":
            raise Refused(f"{self.__name__} refused {_ids(len(ids))}: {rest}")
        try:
            found = [float(number) for number in line.split()]
        except ValueError:
            raise self._out_of_step(
                f"answered {_ids(len(ids))} with {_shown(line)}, which is not "
                f"a line of numbers: print messages to the standard error"
            ) from None
        numbers = np.array(found, np.float32)
        if self._measures and (step := _step(line.split())):
            largest = _largest(numbers)
            self.share = max(self.share, step / largest if largest else 0.0)
        return numbers

    def _line(self, ids: list[int], deadline: float) -> str:
        assert self._child is not None
        try:
            line = self._child.line(deadline)
        except TimeoutError:
            raise self._hung(ids) from None
        if line is None:
            raise self._died(ids)
        return line

    def _bytes(self, ids: list[int], count: int, deadline: float) -> bytes:
        assert self._child is not None
        try:
            found = self._child.exactly(count, deadline)
        except TimeoutError:
            raise self._hung(ids) from None
        if found is None:
            raise self._died(ids)
        return found

    # --- start and end ------------------------------------------------------

    def _running(self) -> Child:
        """Return the running process; start the program if necessary.

        Raises:
            ProgramFailed: if it cannot be started, or fails for one id.
        """
        if self._child is not None:
            return self._child
        if self._failure:
            raise ProgramFailed(self._failure)
        self._starts += 1
        try:
            self._child = Child(self._command)
        except OSError as error:
            name = self._command[0]
            raise ProgramFailed(
                f"{name} cannot be started: {error.strerror or error}"
            ) from None
        weakref.finalize(self, self._child.end)
        self._greet(self._child)
        return self._child

    def _greet(self, child: Child) -> None:
        """Request the scores of id 0, and read a greeting before them."""
        deadline = monotonic() + self._start_seconds
        self._measures = True
        child.send("0", deadline)
        first = self._line([0], deadline)
        words = dict(word.partition("=")[::2] for word in first.split())
        sizes = {n: int(v) for n, v in words.items() if v.isdecimal()}
        greets = bool(words) and words.keys() <= WORDS
        can = frozenset(words if greets else ())
        self.has_cache, self.dumps = "cache" in can, "dump" in can
        self._binary = "binary" in can
        self.block_size = sizes.get("block_size") if greets else None
        said = sizes.get("vocab_size") if greets else None
        self.vocab_size = self._given or said
        numbers = (
            self._numbers([0], deadline)
            if greets
            else self._parsed(first, [0])
        )
        self._fitting(numbers, [0])
        self.step = self.share * _largest(numbers)

    def _deadline(self) -> float:
        return monotonic() + self._seconds

    def _hung(self, ids: list[int]) -> ProgramFailed:
        seconds = self._start_seconds if self._measures else self._seconds
        what = (
            f"gave no whole answer to {_ids(len(ids))} in time "
            f"({seconds:g} s): does it flush its standard output after "
            f"each line?"
        )
        if self._child is not None:
            # a program that hangs would not exit by itself
            self._child.process.kill()
        return self._out_of_step(what)

    def _died(self, ids: list[int]) -> ProgramFailed | Refused:
        child = self._child
        assert child is not None
        what = f"{child.how_it_ended()} instead of answering {_ids(len(ids))}"
        words = self._words(what, child)
        self.end()
        if self._starts >= MOST_STARTS:
            self._failure = words
        status = child.process.poll() or 0
        return Refused(words) if status > 0 else ProgramFailed(words)

    def _out_of_step(self, what: str) -> ProgramFailed:
        """End a program whose next answer could be for an earlier request."""
        child = self._child
        assert child is not None
        self.end()
        words = self._words(what, child)
        self._broken += 1
        if self._broken >= MOST_BROKEN_ANSWERS:
            self._failure = words
        return ProgramFailed(words)

    def _words(self, what: str, child: Child) -> str:
        last = " / ".join(filter(None, child.last_lines))
        shown = f"; its last lines: {last}" if last else ""
        return f"{self.__name__} {what}{shown}"


def _name_of(command: Sequence[str]) -> str:
    """Return the file name of a program, without its interpreter."""
    name = Path(command[0]).name
    files = filter(os.path.isfile, command[1:])
    return Path(next(files, name)).name if RUNS.match(name) else name


def _limit() -> float | None:
    """Return the seconds that LIMIT_VARIABLE sets for a call, or None.

    Raises:
        ValueError: if the variable is not a positive number.
    """
    said = os.environ.get(LIMIT_VARIABLE)
    if not said:
        return None
    with suppress(ValueError):
        if float(said) > 0:
            return float(said)
    raise ValueError(
        f"{LIMIT_VARIABLE} must be a positive number of seconds, got {said!r}"
    )


def _largest(numbers: Float[np.ndarray, "count"]) -> float:
    """Return the largest absolute value of the finite numbers."""
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))


def _step(numbers: Sequence[str]) -> float:
    """Return the size of one unit in the last digit of printed numbers.

    It is 0 if all numbers are integers, or if one has as many digits as
    float32 needs.
    """
    found = [m.groups() for n in numbers if (m := NUMBER.match(n))]
    digits = max((len((a + b).lstrip("0")) for a, b, _ in found), default=0)
    if digits >= ENOUGH_DIGITS or not any(b for _, b, _ in found):
        return 0.0
    return max(10.0 ** (int(e or 0) - len(b)) for _, b, e in found if b)


def _ids(count: int) -> str:
    return "one id" if count == 1 else f"{count} ids"


def _shown(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    more = "..." if len(first) > SHOWN_CHARACTERS else ""
    return repr(first[:SHOWN_CHARACTERS] + more)
