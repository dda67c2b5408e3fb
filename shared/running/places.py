"""Find the place of a value: source line, function, operation, layer."""

import copy
import inspect
import linecache
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jaxtyping
import torch
from torch import nn

from ..notebooks import cell_of
from ..validation import is_installed
from .errors import ROOMS

WIDTH = 48  # most characters of a code expression that a sentence shows

SHARED = Path(__file__).resolve().parents[1]
# folder of the two styles: the package; in a checkout, shared's parent
STYLES = SHARED.parent if SHARED.name == "shared" else SHARED
PACKAGES = Path(torch.__file__).resolve().parents[1]

KIT = tuple(f"{SHARED / room}{os.sep}" for room in ROOMS)
# folders with code that does not belong to a model
NOT_THE_MODEL = (
    # packages whose code turns tensors into arrays
    *(f"{PACKAGES / name}{os.sep}" for name in ("numpy", "jax", "mlx")),
    str(Path(torch.__file__).resolve().parent) + os.sep,
    # wrappers of functions with checked shapes
    str(Path(jaxtyping.__file__).resolve().parent) + os.sep,
    copy.__file__,  # Python's module copy, which copies models
    *KIT,
)

# folders of packages whose functions run operations for a line of the model
OF_HELPERS = [
    f"-packages{os.sep}{name}{os.sep}"
    for name in ("einops", "opt_einsum", "beartype", "typeguard", "tensordict")
]

OPERATORS = {
    "matmul": "@",
    "add": "+",
    "add_": "+=",
    "sub": "-",
    "rsub": "-",
    "mul": "*",
    "mul_": "*=",
    "div": "/",
    "div_": "/=",
    "pow": "**",
    "neg": "-",
    "alias": "[]",
    "index": "[]",
    "select": "[]",
    "slice": "[]",
    "index_put_": "[]=",
}

CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict

# File and bytecode position of each frame, from a value's line to the call.
Stack = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Place:
    """A line of a model, and the operation that is called there.

    Attributes:
        path: absolute path of the source file.
        line: number of the line; 0 for an array that was read from a file.
        op: the operation of torch: "gelu", "@", ...
        function: name of the function with its class, or name of the array.
        span: first and last column of the expression, and its last line.
        layer: layer of the model, None outside of layers.
        inside: step inside a fused operation; "" for the operation's result.
        caller: file and line that call the function, and the function's
            module, if the model's code calls it. == ignores this.
        module: name of the innermost running module; ignored by ==.
        by_op: whether messages name the operation instead of the expression,
            because a line may have several operations. == ignores this.
    """

    path: str
    line: int
    op: str
    function: str = ""
    span: tuple[int, int, int] = (0, 0, 0)
    layer: int | None = None
    inside: str = ""
    caller: tuple[str, int, str] | None = field(default=None, compare=False)
    module: str = field(default="", compare=False)
    by_op: bool = field(default=False, compare=False)

    @property
    def file(self) -> str:
        """Return the path as messages show it."""
        return short_path(self.path)

    @property
    def recorded(self) -> bool:
        """Return whether this is an array from a file, not a line of code."""
        return self.line == 0

    @property
    def in_model(self) -> bool:
        """Return whether the line belongs to the model, not to the kit."""
        return not self.path.startswith(KIT)

    @property
    def is_library(self) -> bool:
        """Return whether the line is in an installed package."""
        return is_installed(self.path)

    @property
    def code(self) -> str:
        """Return the expression in the source, as one line."""
        if self.recorded:
            return self.function
        start, end, last = self.span
        lines = [
            linecache.getline(self.path, number).encode()
            for number in range(self.line, max(self.line, last) + 1)
        ]
        if end:
            lines[-1] = lines[-1][:end]
            lines[0] = lines[0][start:]
        text = b"".join(lines).decode(errors="replace")
        return " ".join(text.split()) or self.op

    def __str__(self) -> str:
        if self.recorded:
            return self.function
        code = self.op if self.by_op else self.code
        if len(code) > WIDTH:
            code = f"{code[: WIDTH // 2]}...{code[-WIDTH // 2 :]}"
        step = f" ({self.inside})" if self.inside else ""
        return f"{self.file}:{self.line} `{code}`{step}"

    __repr__ = __str__

    @property
    def of_module(self) -> str:
        """Return the name of the module whose function this is, or ""."""
        return self.caller[2] if self.caller is not None else ""

    @property
    def site(self) -> str:
        """Return the line that calls the function, and the calling module."""
        if self.caller is None:
            return ""
        path, line, name = self.caller
        where = "line " if path == self.path else f"{short_path(path)}:"
        # a list's item is shown with the list's name: "blocks.0", not "0"
        found = re.search(r"[^.]+(\.\d+)*$", name)
        module = f" ({found[0]})" if found else ""
        return f", called from {where}{line}{module}"

    def to_dict(self) -> dict[str, object]:
        """Return the place as a dict, ready for JSON."""
        names = ["file", "line", "function", "op", "code", "inside"]
        found = {n: getattr(self, n) for n in (*names, "layer", "module")}
        caller = self.caller
        found["caller"] = caller and f"{short_path(caller[0])}:{caller[1]}"
        return found


def find_place(op: str) -> Place:
    """Return the innermost line that is neither torch's nor the kit's."""
    own = torchs = None
    for frame in _frames():
        if not _skipped(frame.f_code.co_filename):
            own = frame
            break
        if torchs is None and frame.f_code.co_name == "forward":
            torchs = frame
    return _place(own or torchs or sys._getframe(), op)


def find_call(
    op: str,
    layers: Mapping[int, int],
    modules: Mapping[int, str],
    outermost: CodeType | None,
) -> tuple[Place, Stack]:
    """Return an operation's place, with layer and caller, and its stack.

    Args:
        op: the operation of torch.
        layers: the result of `layers_of`.
        modules: the name of each module by its id.
        outermost: code of the function that runs the model; outer frames are
            left out.
    """
    stack: list[tuple[str, int]] = []
    own = torchs = None
    caller: tuple[str, int, str] | None = None
    layer, module, called = None, "", ""
    for frame in _frames():
        code = frame.f_code
        if code is outermost:
            break
        name = ""
        if code.co_varnames[:1] == ("self",):
            owner = id(frame.f_locals.get("self"))
            name = modules.get(owner, "")
            layer = layers.get(owner) if layer is None else layer
            module = module or name
        if not _skipped(code.co_filename):
            if own is not None and caller is None:
                path = os.path.abspath(code.co_filename)
                caller = path, frame.f_lineno, called
            if own is None:
                own, called = frame, name
            stack.append((code.co_filename, frame.f_lasti))
        elif code.co_name == "forward":
            torchs = torchs or frame
    # if the model has only torch's own modules, use a line of one of these
    frame = own or torchs or sys._getframe()
    more = {"layer": layer, "caller": caller, "module": module}
    return _place(frame, op, by_op=True, **more), tuple(stack)


def _frames() -> Iterator[FrameType]:
    """Yield the frames around the caller of find_place or find_call."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType, op: str, **more) -> Place:
    code = frame.f_code
    return Place(
        os.path.abspath(code.co_filename),
        frame.f_lineno,
        OPERATORS.get(op, op),
        code.co_qualname.replace("<locals>.", ""),
        _span_of(code, frame.f_lasti),
        **more,
    )


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function or a callable object, if it is Python."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(inspect.unwrap(function), "__code__", None)


def lines_of_code(code: CodeType) -> list[str]:
    """Return the lines of a function's source, [] if no file has them.

    inspect.getsource is not used. It reads an attribute of each module in the
    process, and a module that is imported only then may raise.
    """
    lines = linecache.getlines(code.co_filename)
    return inspect.getblock(lines[code.co_firstlineno - 1 :])


def place_of_code(function: object) -> Place:
    """Return the line that defines a function or a callable's class."""
    code = code_of(function)
    name = type(function).__name__
    if code is None:
        return Place(name, 0, "call", name)
    return Place(code.co_filename, code.co_firstlineno, code.co_name)


def place_of_def(function: object) -> Place:
    """Return the line of a function's def, below its decorators."""
    place, code = place_of_code(function), code_of(function)
    lines = [] if code is None else lines_of_code(code)
    for above, line in enumerate(lines):
        if line.lstrip().startswith("def "):
            return replace(place, line=place.line + above)
    return place


@cache
def _span_of(code: CodeType, instruction: int) -> tuple[int, int, int]:
    """Return an expression's columns and last line, zeros if unknown."""
    positions = islice(code.co_positions(), instruction // 2, None)
    _, last, start, end = next(positions)
    return start or 0, end or 0, last or 0


@cache
def _skipped(file: str) -> bool:
    """Return whether a file holds no code of a model."""
    path = os.path.abspath(file)
    return (
        file.startswith("<")
        or path.startswith(NOT_THE_MODEL)
        or any(folder in path for folder in OF_HELPERS)
    )


def short_path(path: str) -> str:
    """Return a path relative to the current folder, or to a package's parent.

    A cell of a notebook is shown as "In[2]".
    """
    return cell_of(path) or _short_path(path)


@cache
def _short_path(path: str) -> str:
    roots = [os.getcwd(), str(STYLES), *sys.path]
    below = [
        os.path.relpath(path, root)
        for root in roots
        if root and path.startswith(os.path.join(os.path.abspath(root), ""))
    ]
    return min(below, key=len, default=path)


def layers_of(model: object) -> dict[int, int]:
    """Map the id() of each module in a layer to the number of that layer.

    Layers are members of the outermost container whose members have
    submodules and the same class.
    """
    layers: dict[int, int] = {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        # a container inside a layer holds heads or experts, not layers
        if not isinstance(module, CONTAINERS) or id(module) in layers:
            continue
        children = list(module.children())
        kinds = Counter(map(type, children))
        kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
        if count < 2 and (len(children) > 1 or type(module) is nn.Sequential):
            continue
        members = [c for c in children if type(c) is kind and [*c.children()]]
        for layer, member in enumerate(members):
            layers |= {id(part): layer for part in member.modules()}
    return layers


def names_of(model: object) -> dict[int, str]:
    """Return the name of each module by its id."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    return {id(part): name for name, part in parts}
