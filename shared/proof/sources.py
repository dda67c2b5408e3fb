"""Find the sources of numbers that do not come from torch operations.

Some sources leave no changed state behind. They are generators that the system
seeds or that are restored, the clock, addresses, thread ids, and compiled
functions with a state. So each Python call is inspected. Code that catches
exceptions is recorded too, because another text may raise one.
"""

import contextlib
import dis
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import import_module
from inspect import CO_GENERATOR
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import numpy as np
import torch

from ..running.context import PYTHON, of_a_type_checker
from ..running.errors import sentence
from ..running.model.reach import KNOWN_PACKAGES, is_theirs
from ..validation import is_installed

NUMPY, SYSTEM, CLOCK = "NumPy", "the system", "the clock"
TORCHS_SEED, ADDRESSES = "torch's seed", "addresses"
ENVIRONMENT = "the environment"
# sources whose numbers no seed repeats
UNSEEDED = SYSTEM, CLOCK, ADDRESSES, ENVIRONMENT
DRAWS = "random", "getrandbits"
# The compiled functions of these packages (listed without leading underscores)
# only compute from their arguments. So do FUNCTIONS_OF_OTHERS, which are of
# other packages.
PACKAGES = """
abc array ast atexit binascii bisect blake2 builtins cmath codecs collections
contextvars copy copyreg csv datetime decimal enum errno fractions functools
hashlib heapq imp importlib inspect itertools json marshal math md5 numbers
numpy opcode operator pickle random re sha1 sha2 sha256 sha3 sha512 sre
statistics string struct thread threading time tokenize torch types typing
unicodedata warnings weakref zlib
"""
FUNCTIONS_OF_OTHERS = """
_getframe audit exc_info exception flush fspath getsizeof getvalue intern
is_finalizing isatty putenv unsetenv write
"""
PURE, ALSO_PURE = {*PACKAGES.split()}, {*FUNCTIONS_OF_OTHERS.split()}
STATES = "get_state", "set_state", "seed"
NOW = "now", "today", "utcnow"  # methods of dates that read the clock


@dataclass(frozen=True)
class Results:
    """The results of a compiled function, which may depend on a state."""

    function: str


Source = str | Results  # a generator's name, or a function's Results


def is_seeded(source: Source) -> bool:
    """Return whether a seed makes a source repeat its numbers."""
    return not isinstance(source, Results) and source not in UNSEEDED


# The C functions of Python's modules that return numbers from each source.
GIVING = {
    CLOCK: "os.times os.getloadavg resource.getrusage "
    "uuid._generate_time_safe uuid._UuidCreate",
    SYSTEM: "os.urandom os.getrandom",
    ADDRESSES: "builtins.id builtins.hash os.getpid os.getppid gc.get_count "
    "sys.getrefcount sys.getallocatedblocks threading.get_ident "
    "threading.get_native_id",
}


def _by_identity() -> Iterator[tuple[int, str]]:
    """Yield the id and the source of each C function that returns numbers."""
    for source, functions in GIVING.items():
        for name in functions.split():
            module, _, last = name.rpartition(".")
            with suppress(ImportError, AttributeError):  # a system may lack it
                yield id(getattr(import_module(module), last)), source
    for name, function in vars(time).items():
        if name != "sleep" and isinstance(function, BuiltinFunctionType):
            yield id(function), CLOCK


FUNCTIONS = dict(_by_identity())
ENVIRON = {  # the ids of the code that reads environment variables
    id(getattr(type(os.environ), name).__code__)
    for name in ("__getitem__", "__iter__", "__len__")
}
# Python's modules that read the clock only to wait, or to stamp a message.
WAITING = {"logging", "threading", "queue", "concurrent", "selectors"}
# Exceptions that do not depend on numbers, so code may catch them.
HARMLESS = {"ImportError", "ModuleNotFoundError", "AttributeError"}
HARMLESS |= {"NameError", "KeyError", "TypeError", "NotImplementedError"}
HARMLESS |= {"StopIteration", "AssertionError"}
EXITS = "__exit__", "__aexit__"
ENDS = "RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS"


class Sources:
    """Inspects each Python call, and records sources of numbers.

    Attributes:
        drawn: the sources that calls used.
        catching: functions of the author that catch exceptions.
        lost: why some calls were not inspected, or "".
    """

    def __init__(self) -> None:
        self.drawn = dict[Source, None]()
        self.catching = dict[str, None]()
        self.lost = ""

    def look(self, frame: FrameType, event: str, function: Any) -> None:
        """Inspect a profiler event; never raise, or the profiling ends."""
        try:
            if event == "c_call":
                self._called(frame, function)
            elif event == "call":
                self._enter(frame)
        except Exception as error:
            self.lost = f"their inspection raised {sentence(error)}"

    def _called(self, frame: FrameType, function: Any) -> None:
        if function is sys.setprofile and is_theirs(frame.f_code.co_filename):
            self.lose()
        if source := _source(function, frame):
            self.drawn[source] = None

    def lose(self) -> None:
        """Record that the model replaced this class's profile function."""
        self.lost = "the model sets a profiler"

    def _enter(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if code is random.Random.seed.__code__:
            if frame.f_locals.get("a", 0) is None:
                self.drawn[SYSTEM] = None
        elif id(code) in ENVIRON:
            if _for_the_author(caller):
                self.drawn[ENVIRONMENT] = None
        elif code is contextlib.suppress.__init__.__code__:
            if caller is not None and is_theirs(caller.f_code.co_filename):
                self.catching[caller.f_code.co_name] = None
        elif is_theirs(code.co_filename):
            caught = _caught(code)
            if not caught <= HARMLESS or caught & frame.f_globals.keys():
                self.catching[code.co_name] = None
            if _is_exit(code, caller) and _returns_more(code):
                self.catching[code.co_qualname] = None


def _source(function: Any, frame: FrameType) -> Source | None:
    """Return the source from which a C function gets a number, or None.

    No code of the author may run here, such as `==` of an array.
    """
    found = FUNCTIONS.get(id(function), "")
    if found == SYSTEM:
        return SYSTEM
    if found == ADDRESSES:
        code = frame.f_code  # an address in __hash__ only serves as a dict key
        theirs = is_theirs(code.co_filename) and code.co_name != "__hash__"
        return found if theirs else None
    name, owner = function.__name__, getattr(function, "__self__", None)
    if name == "data_ptr" and issubclass(type(owner), torch.Tensor):
        return ADDRESSES if is_theirs(frame.f_code.co_filename) else None
    if name == "_to_dlpack" and _for_the_author(frame):
        return Results("torch.utils.dlpack.to_dlpack")
    if issubclass(type(owner), torch.Generator):
        return TORCHS_SEED if name in ("seed", "initial_seed") else None
    if owner is random.random.__self__ and name in DRAWS:  # type: ignore
        return None if _by_a_type_checker(frame) else PYTHON
    if owner is np.random.mtrand._rand and name not in STATES:
        return NUMPY
    if found or (name in NOW and _is_a_date(owner)):
        return CLOCK if _for_the_author(frame) else None
    return _unknown(function, owner, frame)


def _unknown(function: Any, owner: Any, frame: FrameType) -> Results | None:
    """Return a compiled function as a source, if it may have a state.

    Examples are functions of sys, of files, and of an author's extension.
    """
    module = home = getattr(function, "__module__", None)
    if home is None:  # a method, perhaps of a class of the author's
        kinds = [
            k for k in type(owner).__mro__ if function.__name__ in vars(k)
        ]
        home = (kinds or [type(owner)])[0].__module__
    pure = home.partition(".")[0].lstrip("_") in PURE
    if module == "decimal":  # functions of decimal read or set a context
        pure = False
    if pure or function.__name__ in ALSO_PURE or not _for_the_author(frame):
        return None
    return Results(f"{home.lstrip('_')}.{function.__name__}")


def _is_a_date(owner: Any) -> bool:
    return issubclass(type(owner), type) and issubclass(owner, date)


def _for_the_author(frame: FrameType | None) -> bool:
    """Return whether the model author's code asked for a number.

    Calls of Python's own modules, such as uuid, may lie in between.
    """
    while frame is not None:
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name in WAITING:
            return False
        file = frame.f_code.co_filename
        if is_theirs(file):
            return True
        passed = name in sys.stdlib_module_names or is_installed(file)
        if not passed or name in KNOWN_PACKAGES:
            return False
        frame = frame.f_back
    return False


def _by_a_type_checker(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_filename == random.__file__:
        frame = frame.f_back
    return of_a_type_checker(frame.f_code.co_filename) if frame else False


# --- Code that catches exceptions --------------------------------------------


@cache
def _caught(code: CodeType) -> frozenset[str]:
    """Return the names of the exceptions that some code catches.

    A name is "" if the code does not show it, as in a bare `except`.
    """
    steps = [*dis.get_instructions(code)]
    found, names = set[str](), list[str]()
    for number, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR"):
            names.append(str(step.argval))
        elif step.opname.startswith("LOAD_"):
            names.append("")
        elif step.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
            found |= {*(names or [""])}
        if step.opname == "PUSH_EXC_INFO" and _ends(steps, number + 1):
            found.add("")
        if not step.opname.startswith(("LOAD_", "BUILD_TUPLE", "CACHE")):
            names = []
    return frozenset(found)


def _ends(steps: list[dis.Instruction], first: int) -> bool:
    """Return whether a handler stops an exception without naming it.

    Such handlers are a bare `except`, and a `finally` that returns, yields or
    raises another exception. The handler of `with` does not count, because
    `__exit__` stops the exception there.
    """
    if steps[first].opname in ("WITH_EXCEPT_START", "POP_TOP"):
        return steps[first].opname == "POP_TOP"
    place = {step.offset: number for number, step in enumerate(steps)}
    todo, seen = [first], set[int]()
    while todo:
        number = todo.pop()
        step = steps[number]
        if step.opname in ("POP_EXCEPT", "YIELD_VALUE") or _raises(step):
            return True
        if number in seen or step.opname in ENDS:
            continue
        seen.add(number)
        jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        if jumps:
            todo.append(place[step.argval])
        named = steps[number - 1].opname == "CHECK_EXC_MATCH"
        always = step.opname.startswith("JUMP") and "IF" not in step.opname
        if not (jumps and (named or always)):
            todo.append(number + 1)
    return False


def _raises(step: dis.Instruction) -> bool:
    """Return whether a bytecode step raises a new exception."""
    return step.opname == "RAISE_VARARGS" and bool(step.arg)


def _is_exit(code: CodeType, caller: FrameType | None) -> bool:
    """Return whether code runs because a `with` statement calls `__exit__`."""
    stack = contextlib.ExitStack.__exit__.__code__
    pushed = caller is not None and caller.f_code is stack
    return code.co_name in EXITS or (
        pushed and not code.co_flags & CO_GENERATOR
    )


@cache
def _returns_more(code: CodeType) -> bool:
    """Return whether an `__exit__` may stop an exception.

    It does so if it returns a true value, or raises another exception.
    """
    steps = [*dis.get_instructions(code)]
    returned = [
        step if step.opname == "RETURN_CONST" else before
        for before, step in pairwise(steps)
        if step.opname in ("RETURN_VALUE", "RETURN_CONST")
    ]
    empty = [
        step.opname.endswith("_CONST") and not step.argval for step in returned
    ]
    return not all(empty) or any(map(_raises, steps))
