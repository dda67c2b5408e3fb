"""The settings of a run: random numbers, threads, what a caller has set."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
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
)  # of their files


def seed_all(seed: int) -> None:
    """Seed each generator that a model may draw from."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # which would note the whole stack, for devices that are not there
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def draws_put_back() -> Iterator[None]:
    """Put the states of all global generators back afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed everything inside, and put every state back afterwards."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        # code that is compiled shows no hook its modules
        with draws_put_back(), as_written():
            seed_all(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def random_states() -> dict[str, object]:
    """Return the state of each global generator, to be compared."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        PYTHON: random.getstate(),
        "NumPy": (name, np.asarray(keys).tobytes(), *rest),
    }


def drawn_outside_torch(seed: int, call: Callable[[], object]) -> list[str]:
    """Return which global generators a call draws from, but for torch's.

    The call seeds them first, with this seed.
    """
    seed_all(seed)
    before = random_states()
    call()
    after = random_states()
    return [n for n in before if n != "torch" and before[n] != after[n]]


def of_a_type_checker(file: str) -> bool:
    """Whether code is a checker's of types, by the name of its file."""
    return any(name in file for name in TYPE_CHECKERS)


def only_type_checkers_draw(call: Callable[[], object]) -> bool:
    """Whether only a checker of types draws from Python's random."""
    drawing: set[str] = set()
    generator = random.random.__self__  # type: ignore[attr-defined]

    def look(frame: FrameType | None, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", 0) is generator:
            while frame and frame.f_code.co_filename == random.__file__:
                frame = frame.f_back
            drawing.add(frame.f_code.co_filename if frame else "")

    with calls_seen_by(look):
        call()
    drawing.discard(__file__)  # it seeds them
    return bool(drawing) and all(map(of_a_type_checker, drawing))


class RecordedDraws:
    """Records the shapes of all random numbers that are drawn inside."""

    def __init__(self) -> None:
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and record what it draws."""
        answer = func(*args, **kwargs)
        if _draws(func, args, kwargs):
            first = answer[0] if isinstance(answer, tuple) else answer
            self.shapes.append((str(func), (*getattr(first, "shape", ()),)))
        return answer


def _draws(func, args, kwargs):
    """Whether an operation draws; attention does if it drops numbers out."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    takes = any(a.name == "dropout_p" for a in func._schema.arguments)
    given = arguments_of(func, args, kwargs)
    return not takes or given.get("dropout_p", 0.0) > 0


# --- Threads -----------------------------------------------------------------

# Multiplications of a forward pass below which several threads wait for each
# other longer than they compute.
SMALL_WORK = 2e9


@contextmanager
def few_threads(
    parameters: int, tokens: int, count: int | None = None
) -> Iterator[int]:
    """Compute on one thread inside where a model and its input are small.

    With a count, on as many.
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
_devices: list[torch.device] = []  # the callers' default devices


def one_run(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that runs models given to it.

    It runs as if called in a new program: gradients are recorded, without
    autocast or inference mode, on the CPU by default. One thread runs at a
    time, since seeds, hooks and the standard output belong to the process;
    where torch.distributed has several processes, all run it together.
    Afterwards each part of a given model is in the mode it was in.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # of pytest
        given = (*args, *kwargs.values())
        with _lock, joined(), _own_context(), modes_kept(given):
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                if len(_devices) > 1 or kwargs.get("debug"):
                    raise
                # a user's mistake: none of the frames between are theirs
                cause = with_their_frames(error.__cause__)
                raise error.with_traceback(None) from cause

    return run


@contextmanager
def callers_device() -> Iterator[None]:
    """Give the model's own code the default device it is written for."""
    device = _devices[0] if _devices else torch.device("cpu")
    if device.type in ("cpu", "meta"):  # a tensor on meta has no numbers
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
        # autocast keeps the weights that it cast until the outermost one ends:
        # a model's own shall end, so that changed weights are cast again
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
    """Put each part back in train or eval mode."""
    models = [model for model in given if isinstance(model, nn.Module)]
    try:
        modes = [(p, p.training) for model in models for p in model.modules()]
    except TypeError:  # a part without a hash: such a model is refused
        modes = []
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def during(what: str, who: str = "the model") -> Iterator[None]:
    """Turn an exception inside into a failure that says when it came.

    All that runs a model is inside: several ranks begin and end it together.

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
