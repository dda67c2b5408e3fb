"""Set up a run: random numbers, threads, and the settings of the caller."""

import ctypes
import gc
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from .errors import (
    HookRaised,
    ModelRaised,
    place_of,
    sentence,
    with_their_frames,
)
from .operations import arguments_of, as_written, calls_seen_by
from .ranks import joined, together

# --- Random numbers ----------------------------------------------------------

PYTHON = "Python's random"
TYPE_CHECKERS = (
    "beartype",
    "jaxtyping",
    "typeguard",
)  # packages of type checkers, named in the paths of their files


def seed_all(seed: int) -> None:
    """Seed each generator that a model may draw from."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would record a stack for each missing device
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def draws_put_back() -> Iterator[None]:
    """Restore the states of all global generators after the body."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed all generators for the body; restore their states after it."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        # as_written: not compiled, because compiled code runs no module hooks
        with draws_put_back(), as_written():
            seed_all(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def random_states() -> dict[str, object]:
    """Return the state of each global generator, for comparisons."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        PYTHON: random.getstate(),
        "NumPy": (name, np.asarray(keys).tobytes(), *rest),
    }


def drawn_outside_torch(seed: int, call: Callable[[], object]) -> list[str]:
    """Return the global generators, except torch's, that a call draws from.

    The generators are seeded first, with the given seed.
    """
    seed_all(seed)
    before = random_states()
    call()
    after = random_states()
    return [n for n in before if n != "torch" and before[n] != after[n]]


def of_a_type_checker(file: str) -> bool:
    """Return whether a file belongs to a type checker, by its path."""
    return any(name in file for name in TYPE_CHECKERS)


def only_type_checkers_draw(call: Callable[[], object]) -> bool:
    """Return whether only type checkers draw from random during a call."""
    drawing: set[str] = set()
    generator = random.random.__self__  # type: ignore[attr-defined]

    def look(frame: FrameType | None, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", 0) is generator:
            while frame and frame.f_code.co_filename == random.__file__:
                frame = frame.f_back
            drawing.add(frame.f_code.co_filename if frame else "")

    with calls_seen_by(look):
        call()
    drawing.discard(__file__)  # this file seeds the generators
    return bool(drawing) and all(map(of_a_type_checker, drawing))


class RecordedDraws:
    """Records the shapes of all random numbers that are drawn.

    The state of torch's generator after each draw is recorded as well, because
    some operations (rrelu) draw more or fewer numbers for other inputs.
    """

    def __init__(self) -> None:
        self.drawn: list[tuple[str, tuple[int, ...], int]] = []

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and record its draws."""
        answer = func(*args, **kwargs)
        if _draws(func, args, kwargs):
            first = answer[0] if isinstance(answer, tuple) else answer
            shape = (*getattr(first, "shape", ()),)
            state = hash(torch.get_rng_state().numpy().tobytes())
            self.drawn.append((str(func), shape, state))
        return answer


def _draws(func, args, kwargs):
    """Return whether an operation draws random numbers, as dropout does."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    takes = any(a.name == "dropout_p" for a in func._schema.arguments)
    given = arguments_of(func, args, kwargs)
    return not takes or given.get("dropout_p", 0.0) > 0


# --- Threads -----------------------------------------------------------------

# In a forward pass with fewer multiplications than this, threads spend more
# time waiting for each other than computing.
SMALL_WORK = 2e9


@contextmanager
def few_threads(
    parameters: int, tokens: int, count: int | None = None
) -> Iterator[int]:
    """Use one thread in the body if a model and its input are small.

    If `count` is given, use that many threads.
    """
    before = torch.get_num_threads()
    if count is None:
        count = 1 if parameters * tokens < SMALL_WORK else before
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


# --- One run -----------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()
_devices: list[torch.device] = []  # the default devices of callers of one_run


def one_run(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that gets models as arguments and runs them.

    The function runs as if called in a new program: gradients are recorded,
    autocast and inference mode are off, and the default device is the CPU.
    Only one thread runs such functions at a time, because seeds, hooks and the
    standard output belong to the process. If torch.distributed has several
    processes, all run the function together. Afterwards each module is again
    in train or eval mode, as before.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # hides this frame in pytest's tracebacks
        given = (*args, *kwargs.values())
        with _lock, joined(), _own_context(), modes_kept(given):
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                if len(_devices) > 1 or kwargs.get("debug"):
                    raise
                # a user's mistake: show the user's frames, and hide ours
                cause = with_their_frames(error.__cause__)
                raise error.with_traceback(None) from cause

    return run


def return_memory() -> None:
    """Return freed memory to the system, if the C library can.

    Exceptions are freed first, because their frames may hold copies of a
    model. The C library would keep the memory of freed copies, in pieces that
    are too small for the next copy.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: torch.device | None) -> float:
    """Return the free memory of a device in bytes; inf if it is unknown."""
    if device is not None and device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, StopIteration):  # only Linux has /proc/meminfo
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(one for one in lines if one.startswith("MemAvailable"))
        return 1024.0 * int(line.split()[1])
    return math.inf


@contextmanager
def callers_device() -> Iterator[None]:
    """Run the body under the default device that the user has set."""
    device = _devices[0] if _devices else torch.device("cpu")
    if device.type in ("cpu", "meta"):  # a tensor on meta has no values
        yield
    else:
        with device:
            yield


@contextmanager
def _own_context() -> Iterator[None]:
    default = torch.get_default_device()
    _devices.append(default)
    with ExitStack() as stack:
        stack.callback(_devices.pop)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # autocast reuses its casts of weights until the outermost context
        # ends. Turn the caller's off: then the model's own is the outermost,
        # and changed weights are cast again
        torch.clear_autocast_cache()
        found = torch.accelerator.current_accelerator() or default
        for kind in {"cpu", default.type, found.type}:
            if torch.amp.is_autocast_available(kind):
                before = torch.is_autocast_enabled(kind)
                stack.callback(torch.set_autocast_enabled, kind, before)
                torch.set_autocast_enabled(kind, False)
        if default.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def modes_kept(given: Iterable[object]) -> Iterator[None]:
    """Restore the train or eval mode of each module after the body."""
    models = [model for model in given if isinstance(model, nn.Module)]
    try:
        modes = [(p, p.training) for model in models for p in model.modules()]
    except TypeError:  # a part that is not hashable: the model will be refused
        modes = []
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def during(what: str, who: str = "the model") -> Iterator[None]:
    """Turn an exception in the body into a failure that says when it occurred.

    The kit calls models only in its body; all ranks enter and leave together.

    Raises:
        ModelRaised: with the model's own exception as its cause.
    """
    try:
        with together(what or who), callers_device():
            yield
    except HookRaised:
        raise
    except Exception as error:
        place = place_of(error)
        where = f" ({place})" if place else ""
        words = f"{who} raised {sentence(error)}{where} {what}"
        raise ModelRaised(words.rstrip()) from error
