"""Where a call takes numbers from that no operation of torch's makes.

A new generator that the system seeds, the clock, draws after which a state is
put back: none of them changes a state that can be compared. Code that catches
exceptions is noted as well: another text may raise one.
"""

import contextlib
import dis
import os
import random
import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from ..running.context import PYTHON, of_a_type_checker
from ..running.model.reach import is_theirs

NUMPY, SYSTEM, CLOCK = "NumPy", "the system", "the clock"
TORCHS_SEED = "torch's seed"
UNSEEDED = SYSTEM, CLOCK  # no seed of a call repeats or changes them
DRAWS = "random", "getrandbits"
STATES = "get_state", "set_state", "seed"
# Raised for any numbers.
HARMLESS = {"ImportError", "ModuleNotFoundError", "AttributeError"}
HARMLESS |= {"NameError", "KeyError", "TypeError", "NotImplementedError"}
HARMLESS |= {"StopIteration", "AssertionError"}


class Sources:
    """Looks at each call of Python's, and notes what numbers come from.

    Attributes:
        drawn: names of generators.
        catching: functions of the author's that catch exceptions.
    """

    def __init__(self) -> None:
        self.drawn = dict[str, None]()
        self.catching = dict[str, None]()

    def look(self, frame: FrameType, event: str, function: Any) -> None:
        """Look at one event, as sys.setprofile gives it."""
        if event == "c_call":
            name = _source(function, frame)
            if name:
                self.drawn[name] = None
        elif event == "call":
            self._enter(frame)

    def _enter(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if code is random.Random.seed.__code__:
            if frame.f_locals.get("a", 0) is None:
                self.drawn[SYSTEM] = None
        elif code is contextlib.suppress.__init__.__code__:
            if caller is not None and is_theirs(caller.f_code.co_filename):
                self.catching[caller.f_code.co_name] = None
        elif is_theirs(code.co_filename) and _catches(code):
            self.catching[code.co_name] = None


def _source(function: Any, frame: FrameType) -> str:
    """Return what a function in C takes a number from, or ""."""
    name, owner = function.__name__, getattr(function, "__self__", None)
    if function is os.urandom:
        return SYSTEM
    if isinstance(owner, torch.Generator):
        return TORCHS_SEED if name in ("seed", "initial_seed") else ""
    if owner is random.random.__self__ and name in DRAWS:  # type: ignore
        return "" if _by_a_type_checker(frame) else PYTHON
    if owner is np.random.mtrand._rand and name not in STATES:
        return NUMPY
    module = getattr(function, "__module__", None)
    clock = module == "time" and name != "sleep"
    if clock or (owner, name) == (_datetime(), "now"):
        return CLOCK if is_theirs(frame.f_code.co_filename) else ""
    return ""


def _datetime() -> Any:
    module = sys.modules.get("datetime")
    return getattr(module, "datetime", None)


def _by_a_type_checker(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_filename == random.__file__:
        frame = frame.f_back
    return of_a_type_checker(frame.f_code.co_filename) if frame else False


@cache
def _catches(code: CodeType) -> bool:
    """Whether code catches an exception that depends on numbers."""
    names, before = list[str](), ""
    for step in dis.get_instructions(code):
        if (before, step.opname) == ("PUSH_EXC_INFO", "POP_TOP"):
            return True  # all of them
        before = step.opname
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR"):
            names.append(str(step.argval))
        elif "EXC_MATCH" in step.opname:
            if names and not {*names} <= HARMLESS:
                return True
            names = []
        elif step.opname != "BUILD_TUPLE":
            names = []
    return False
