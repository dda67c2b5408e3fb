"""Build a model again for each check, by its factory or as a copy."""

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from ..context import callers_device, isolated, modes_kept
from ..errors import HookRaised, UnusableModel, place_of, sentence
from ..ranks import together
from .kept_state import KeptState, other_in_copy, parted_by_copy
from .reach import count_as_theirs
from .sizes import GIVEN_WINDOW

# --- Models in wrappers ------------------------------------------------------

WRAPPERS = (  # each wrapper has its model in .module
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    torch.optim.swa_utils.AveragedModel,
)


def unwrapped(model: Any) -> Any:
    """Return the module inside wrappers of torch.compile, DDP or averaging."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, WRAPPERS):
            model = model.module
        else:
            return model


AS_FUNCTION = "or a function of the ids: lambda ids: model(ids)"


def require_module(model: nn.Module) -> None:
    """Refuse a traced or exported module, or one without shapes or modes."""
    name = type(model).__name__
    traced = torch.jit.TopLevelTracedModule
    try:
        parts = [*model.modules()]
    except TypeError as error:
        raise UnusableModel(
            f"PyTorch cannot list the parts of {name} ({sentence(error)}): a "
            f"class with __eq__ needs a __hash__ as well"
        ) from None
    if any(isinstance(part, traced) for part in parts):
        raise UnusableModel(
            f"{name} is traced, and a trace keeps neither modes nor "
            f"gradients: give the model before torch.jit.trace, {AS_FUNCTION}"
        )
    for tensor, value in chain(
        model.named_parameters(), model.named_buffers()
    ):
        if is_lazy(value):
            raise UnusableModel(
                f"{tensor} of {name} has no shape yet: call the model "
                f"once before it is checked"
            )
    try:
        with modes_kept([model]):
            model.train(model.training)
    except NotImplementedError as error:  # raised by modules of torch.export
        raise UnusableModel(
            f"{name} has no train and eval mode ({sentence(error)}): give "
            f"the model before torch.export, {AS_FUNCTION}"
        ) from None


# --- Building and copying ----------------------------------------------------

Model = Callable[..., Any]

CASTS = {  # methods of nn.Module that cast, by dtype
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "half",
}


class Builder:
    """Builds a model again, so that no check sees another check's changes."""

    def __init__(
        self,
        given: Any,
        seed: int,
        device: torch.device | str | None,
        window: int | None = None,
    ):
        if not callable(given):
            raise UnusableModel(
                f"a model, a function or a factory is needed, got "
                f"{type(given).__name__}"
            )
        self.seed, self.window = seed, window
        self.notes: list[str] = []  # sentences for the report
        self.states: Any = None  # the proof's States, see proof/runs.py
        self.in_double: dict[bool, bool] = {}  # see `variant.in_double`
        self.scarce: str | None = None  # see `variant.scarce`
        self.given, self.outer = self._as_written(given), given
        # the device of each model; by default, the device of the first model
        self.device = None if device is None else torch.device(device)
        self.fresh = is_factory(given)  # whether a factory makes fresh weights
        self.can_copy = True  # whether to copy instead of building again
        self.original: nn.Module | None = None
        # state that models share (class attributes, globals), saved before any
        # call
        self.shared: KeptState | None = None
        self._first: Callable[[], Any] | None = None
        self._compared: nn.Module | None = None  # whose copy was compared

    def build(
        self,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> Model:
        """Build the model again, and return it.

        Args:
            seed: another seed for the model's weights.
            device: another device for the model.
        """
        if seed is None and self.original is not None:
            return self._copied(self.original).to(device or self.device)
        with isolated(self.seed if seed is None else seed), callers_device():
            model = self._make() if self.fresh else self._copy(self.given)
            elsewhere = torch.empty(0)  # for a model without tensors
        if self.device is None:
            parts = model if isinstance(model, nn.Module) else nn.Module()
            tensors = [*parts.parameters(), *parts.buffers(), elsewhere]
            self.device = tensors[0].device
        elif isinstance(model, nn.Module):
            model = model.to(device or self.device)
        if self.window is not None:
            with suppress(Exception):  # a traced module refuses new attributes
                setattr(model, GIVEN_WINDOW, self.window)
        for part in model.modules() if isinstance(model, nn.Module) else ():
            # let FSDP gather the weights in each forward pass, because checks
            # may have changed the shards
            reshard: Any = getattr(part, "set_reshard_after_forward", None)
            if reshard is not None:
                reshard(True)
        return model

    def keep_shared(self, model: Model) -> None:
        """Save the state that models share, before the first call of a model.

        A first call may set attributes of classes and globals of files.
        """
        if isinstance(model, nn.Module):
            kinds = dict.fromkeys(type(part) for part in model.modules())
            self.shared = KeptState([*kinds])

    def put_back_shared(self) -> None:
        """Restore the shared state to what it was before the first call."""
        if self.shared is not None:
            self.shared.put_back(always=True)

    def program(self) -> Model:
        """Return the model as its user runs it, in its wrappers.

        A model that the user gave is not copied, so the caller must restore
        it.
        """
        if not self.fresh:
            return self.outer
        with isolated(self.seed), callers_device():
            model = self.given()
        return model.to(self.device) if hasattr(model, "to") else model

    def keep(self, model: Model) -> Model:
        """From now on, copy a model instead of building it; return a copy."""
        if self.fresh and isinstance(model, nn.Module):
            with suppress(Exception):
                copied = self._copied(model)
                self.original = model
                return copied
        return model

    def _make(self) -> Model:
        name = name_of(self.given) or "the factory"
        try:
            with together("building the model"):
                model = self.given()
        except Exception as error:
            place = f" ({where})" if (where := place_of(error)) else ""
            raise UnusableModel(
                f"{name} raised {sentence(error)}{place}"
            ) from error
        if not callable(model):
            raise UnusableModel(
                f"{name} returned no model but {type(model).__name__}"
            )
        if self._first is not None and self._first() is model:
            return self._copy(model)  # the factory returned it before
        if self._first is None and isinstance(model, nn.Module):
            self._first = weakref.ref(model)
        return self._as_written(model)

    def _as_written(self, model: Model) -> Model:
        """Return the module inside its wrappers, with a note if compiled."""
        inner = unwrapped(model)
        count_as_theirs(inner)
        if not isinstance(model, nn.Module):
            return inner
        require_module(inner)
        if any(
            hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
            for part in model.modules()
        ):
            note = (
                "the model is checked as it is written, not as compiled: "
                "only check_causality compares the two programs"
            )
            if note not in self.notes:
                self.notes.append(note)
        return inner

    def _copy(self, model: Model) -> Model:
        if not isinstance(model, nn.Module) or not self.can_copy:
            return model
        count_as_theirs(model)
        try:
            return self._copied(model)
        except Exception as error:
            self._give_up(f"the model cannot be copied ({sentence(error)})")
            return model

    def _copied(self, model: nn.Module) -> nn.Module:
        """Copy a model; only the first copy is compared with it."""
        copied = deep_copy(model, compare=model is not self._compared)
        self._compared = model
        return copied

    def require_own_modules(self, model: Any, called: list[nn.Module]) -> None:
        """Stop copying if a copy calls modules of its original."""
        source = self.original or self.given
        if not isinstance(source, nn.Module) or model is source:
            return
        parts = {*called} - {*model.modules()}
        shared = sorted(n for n, m in source.named_modules() if m in parts)
        if shared and self.original is not None:
            self.original = None  # from now on, build the model again instead
        elif shared:
            self._give_up(
                f"a copy still calls {', '.join(shared[:3])} of the original "
                f"(a lambda or closure as an attribute?)"
            )

    def _give_up(self, reason: str) -> None:
        self.can_copy = False
        self.notes.append(
            f"{reason}: checks that change weights are left out; give a "
            f"factory"
        )


def deep_copy(model: nn.Module, compare: bool = True) -> nn.Module:
    """Copy a model with the hooks on its gradients, which deepcopy omits.

    A buffer that a function of the model also reads is not copied: the copy
    and the original share it.

    Args:
        model: the model.
        compare: whether each value of the copy must equal the model's.

    Raises:
        ValueError: if a copy would still use a parameter of the original, or
            if one of its values differs.
    """
    _require_own_memory(model)
    copied = copy.deepcopy(model)
    shared, why = parted_by_copy(model, copied)
    if why:
        raise ValueError(why)
    if shared:
        copied = copy.deepcopy(model, {id(t): t for t in shared})
    if compare and (other := other_in_copy(model, copied)):
        raise ValueError(f"a copy has another {other}")
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    for parameter, twin in pairs:
        if hooks := parameter._backward_hooks:
            twin._backward_hooks = hooks.copy()
    return copied


def _require_own_memory(model: nn.Module) -> None:
    """Refuse arrays that share a tensor's memory, because copies would not."""
    held = [
        value
        for module in model.modules()
        for value in (*vars(module).values(), *module._buffers.values())
    ]
    arrays = [value for value in held if isinstance(value, np.ndarray)]
    tensors = [v for v in held if isinstance(v, torch.Tensor) and v.is_cpu]
    for array, tensor in product(arrays, tensors):
        with suppress(NotImplementedError):  # a tensor that has no storage
            memory, start = tensor.untyped_storage(), array.ctypes.data
            apart = start - memory.data_ptr()
            if -array.nbytes < apart < memory.nbytes():
                raise ValueError("an array shares a tensor's memory")


def is_factory(given: Model) -> bool:
    """Return whether a callable is a factory, which takes no arguments."""
    if isinstance(given, nn.Module):
        return False
    try:
        signature = inspect.signature(given)
        signature.bind()
    except (TypeError, ValueError):
        if isinstance(given, type):
            raise UnusableModel(
                f"{given.__name__} is a class that needs arguments: give a "
                f"model, or a function without arguments that builds one"
            ) from None
        return False
    # a function with *args takes tokens; a class with *args builds a model
    kinds = {p.kind for p in signature.parameters.values()}
    built = given.func if isinstance(given, functools.partial) else given
    return (
        isinstance(built, type)
        or inspect.Parameter.VAR_POSITIONAL not in kinds
    )


def name_of(given: Model) -> str | None:
    """Return the name of a model's class or of a function, if it has one."""
    given = unwrapped(given)
    if isinstance(given, functools.partial):
        return name_of(given.func)
    if isinstance(given, nn.Module):
        return type(given).__name__
    name = getattr(given, "__name__", type(given).__name__)
    return None if name == "<lambda>" else name


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model in place, as .double() and .bfloat16() do."""
    if isinstance(model, torch.jit.ScriptModule):  # .double() has no effect
        return model.to(dtype)
    # .to(dtype) would make complex buffers real as well
    return getattr(model, CASTS[dtype])()


def is_mapped() -> bool:
    """Return whether vmap is running, under which no tensor can be read."""
    return torch._C._functorch.maybe_current_level() is not None


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    after: Callable[..., Any],
    before: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Call functions before and after each module call in the body.

    Scripted modules do not accept hooks, and are left out.
    """

    def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            if is_mapped():
                return None
            try:
                return hook(*given)
            except AssertionError:  # a ModelRaised from an inner module
                raise
            except Exception as error:
                raise HookRaised(sentence(error)) from error

        return run

    with ExitStack() as hooks:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if before is not None:
                hooks.enter_context(
                    module.register_forward_pre_hook(
                        guarded(before), with_kwargs=True
                    )
                )
            hooks.enter_context(
                module.register_forward_hook(guarded(after), with_kwargs=True)
            )
        yield


@contextmanager
def called_modules() -> Iterator[list[nn.Module]]:
    """Collect the modules that are called in the body."""
    called: list[nn.Module] = []

    def note(module: nn.Module, args: object) -> None:
        called.append(module)

    with register_module_forward_pre_hook(note), warnings.catch_warnings():
        # compiled parts run as written so that no hook fires twice: hide the
        # warning of torch.compile about that
        warnings.filterwarnings("ignore", "Using `torch.compile")
        yield called
