"""Randomness that starts where we say, and leaves no trace."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from .operations import Operations
from .stances import as_written


def seed_all(seed: int) -> None:
    """Seed each generator that a model may draw from."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # which would note the whole stack, for devices that are not there
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed everything inside, and put every state back afterwards."""
    states = random.getstate(), np.random.get_state()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        devices = range(torch.cuda.device_count())
        # code that is compiled shows no hook its modules
        with torch.random.fork_rng(devices), as_written():
            seed_all(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def random_states() -> dict[str, object]:
    """Return the state of each global generator, to be compared."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "NumPy": (name, np.asarray(keys).tobytes(), *rest),
    }


class RecordedDraws(Operations):
    """Records the shapes of all random numbers that are drawn inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            first = answer[0] if isinstance(answer, tuple) else answer
            shape = tuple(getattr(first, "shape", ()))
            self.shapes.append((str(func), shape))
        return answer
