"""How a model or a factory wants to be called, and what to call it."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..errors import UnusableModel

Model = Callable[..., Any]

TOKENS = ("input_ids", "idx", "tokens", "x", "ids", "input", "inputs")


@contextmanager
def called_modules() -> Iterator[list[nn.Module]]:
    """Collect the modules that are called inside."""
    called: list[nn.Module] = []

    def note(module: nn.Module, args: object) -> None:
        called.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()


def probe_sizes(vocab: int, block: int) -> list[tuple[int, int]]:
    """Return two sizes of batch and time, told apart from the vocabulary."""

    def shared(batch: int, time: int) -> int:
        sizes = [batch, time, vocab, batch * time, 1]
        return len(sizes) - len(set(sizes))

    sizes = [(b, t) for t in range(min(7, block), 0, -1) for b in (3, 2, 5)]
    sizes.sort(key=lambda size: shared(*size))  # stable: longest first
    first = sizes[0]
    others = [s for s in sizes if s[0] != first[0] and s[1] != first[1]]
    return [first, (others or sizes[1:])[0]]


def is_factory(given: Model) -> bool:
    """Whether a callable builds a model: it takes no arguments."""
    if isinstance(given, nn.Module):
        return False
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind()
    except TypeError:
        if isinstance(given, type):
            raise UnusableModel(
                f"{given.__name__} is a class that needs arguments: give a "
                f"model, or a function without arguments that builds one"
            ) from None
        return False
    # what takes any arguments at all takes tokens, unless it is a class
    kinds = {p.kind for p in signature.parameters.values()}
    built = given.func if isinstance(given, functools.partial) else given
    return (
        isinstance(built, type)
        or inspect.Parameter.VAR_POSITIONAL not in kinds
    )


def token_argument(function: Model) -> tuple[set[str], str | None]:
    """Return a model's argument names, and the one tokens go by, if any."""
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set(), None
    positional = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = set(parameters)
    rest = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
    keyword = next((n for n in TOKENS if n in names), None)
    if positional and (positional[0] in TOKENS or keyword is None):
        return names, None
    if keyword is None and not positional and not rest:
        keyword = TOKENS[0] if parameters else None
    return names, keyword


def device_of(model: Model) -> torch.device:
    """Return where a model's first tensor is."""
    if isinstance(model, nn.Module):
        for tensor in [*model.parameters(), *model.buffers()]:
            return tensor.device
    return torch.device("cpu")


def name_of_model(given: Model, model: Model | None = None) -> str:
    """Return what to call a model: its class, or the function's name."""
    if isinstance(given, functools.partial):
        return name_of_model(given.func, model)
    name = getattr(given, "__name__", type(given).__name__)
    if isinstance(given, nn.Module) or name == "<lambda>":
        if model is not None and name == "<lambda>":
            return (
                name_of_model(model)
                if isinstance(model, nn.Module)
                else "model"
            )
        return "the factory" if name == "<lambda>" else name
    return name


def shape_in_words(tokens: Int[Tensor, "batch time"]) -> str:
    """Return what messages say about tokens."""
    batch, time = tokens.shape
    return f"tokens of shape ({batch}, {time})"
