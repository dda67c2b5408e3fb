"""Where a value is computed: source line, function, operation, layer."""

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

WIDTH = 48  # of an expression in a sentence

SHARED = Path(__file__).resolve().parents[1]
# the styles lie inside what is installed, and next to shared in a checkout
STYLES = SHARED.parent if SHARED.name == "shared" else SHARED
PACKAGES = Path(torch.__file__).resolve().parents[1]

KIT = tuple(f"{SHARED / room}{os.sep}" for room in ROOMS)
# folders whose frames belong to no model
NOT_THE_MODEL = (
    # they turn tensors into their own arrays
    *(f"{PACKAGES / name}{os.sep}" for name in ("numpy", "jax", "mlx")),
    str(Path(torch.__file__).resolve().parent) + os.sep,
    str(Path(jaxtyping.__file__).resolve().parent) + os.sep,  # its wrappers
    copy.__file__,  # its lines copy a model's value
    *KIT,
)

# packages that carry out operations for a line of the model
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

# Files and instructions from a value's line outwards to the model's call.
Stack = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Place:
    """A line of a model, and the operation that is called there.

    Attributes:
        path: of the source file, absolute.
        line: number of the line; 0 for what has none: an array in a file.
        op: what torch computes there: "gelu", "@", ...
        function: name of the function, with its class; of the array.
        span: of the expression: columns from and to, and its last line.
        layer: of the model, None outside of its layers.
        inside: which step inside the operation, "" for its result.
        caller: file and line that call the function, and the function's
            module, where the model's own code calls it; no part of a
            comparison of places.
        module: the name of the innermost module that runs, likewise.
        by_op: whether messages name the operation instead of the
            expression, as one line may hold several; likewise.
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
        """The path as a reader would write it."""
        return short_path(self.path)

    @property
    def recorded(self) -> bool:
        """Whether this is an array in a file, the function its name."""
        return self.line == 0

    @property
    def in_model(self) -> bool:
        """Whether the line is the model's, not the kit's own."""
        return not self.path.startswith(KIT)

    @property
    def is_library(self) -> bool:
        """Whether the line is in an installed package."""
        return is_installed(self.path)

    @property
    def code(self) -> str:
        """The expression in the source, in one line."""
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
        """The name of the module whose function this is, "" for none."""
        return self.caller[2] if self.caller is not None else ""

    @property
    def site(self) -> str:
        """Where the model calls the function, and for which module."""
        if self.caller is None:
            return ""
        path, line, name = self.caller
        where = "line " if path == self.path else f"{short_path(path)}:"
        # a number in a list goes with the name of the list
        found = re.search(r"[^.]+(\.\d+)*$", name)
        module = f" ({found[0]})" if found else ""
        return f", called from {where}{line}{module}"

    def to_dict(self) -> dict[str, object]:
        """Return what a reader of JSON needs."""
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
    """Return the place with its layer, module and caller, and the stack.

    Args:
        op: what torch computes.
        layers: as `layers_of` returns them.
        modules: the name of each module by its id.
        outermost: the code of the function that runs the model; frames
            above it are not looked at.
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
    # a model of torch's own modules alone: the module's line
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
    """Return the lines of a function's source, [] where they are in no file.

    inspect.getsource asks each module of the process for its file, and an
    alias that imports another module at the first question may raise.
    """
    lines = linecache.getlines(code.co_filename)
    return inspect.getblock(lines[code.co_firstlineno - 1 :])


def place_of_code(function: object) -> Place:
    """Return the line where a function, or a callable's class, is defined."""
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
    """Return an expression's columns and last line; 0: Python kept none."""
    positions = islice(code.co_positions(), instruction // 2, None)
    _, last, start, end = next(positions)
    return start or 0, end or 0, last or 0


@cache
def _skipped(file: str) -> bool:
    """Whether a file belongs to no model."""
    path = os.path.abspath(file)
    return (
        file.startswith("<")
        or path.startswith(NOT_THE_MODEL)
        or any(folder in path for folder in OF_HELPERS)
    )


def short_path(path: str) -> str:
    """Return a path from the current folder, or from its package's.

    Of a notebook's cell the name: "In[2]".
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
    """Return for the id of each module within a layer the layer's number.

    Layers are the outermost container's members that have parts of their
    own and are of one class.
    """
    layers: dict[int, int] = {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        # heads, experts: containers within a layer
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
