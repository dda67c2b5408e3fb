"""Where a value is computed: source line, function, operation, layer."""

import linecache
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

from ...invariants.dependence.place import span_of

SHARED = Path(__file__).resolve().parents[2]
# the styles lie inside what is installed, and beside shared in a checkout
STYLES = SHARED.parent if SHARED.name == "shared" else SHARED

# Folders whose frames are nobody's model: torch, and the kit's own way from
# diff_by_value to the model.
NOT_THE_MODEL = (
    str(Path(torch.__file__).resolve().parent) + os.sep,
    str(SHARED / "invariants") + os.sep,
    str(SHARED / "comparison") + os.sep,
)

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

# The end of what is inside an operation: one head of its value.
HEAD = re.compile(r"(, )?head \d+$")

# Files and instructions from a value's line outwards to the model's call.
Stack = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Place:
    """Where a value is computed.

    Attributes:
        path: of the source file, absolute.
        line: number of the line.
        function: name of the function, with its class.
        op: what torch computes there: "gelu", "@", ...
        layer: of the model, None outside of its layers.
        inside: which step inside the operation, "" for its result.
        span: of the expression: columns from and to, and its last line.
        caller: file and line that call the function, and the function's
            module, where the model's own code calls it; no part of a
            comparison of places.
        module: the name of the innermost module that runs, likewise.
    """

    path: str
    line: int
    function: str
    op: str
    layer: int | None = None
    inside: str = ""
    span: tuple[int, int, int] = (0, 0, 0)
    caller: tuple[str, int, str] | None = field(default=None, compare=False)
    module: str = field(default="", compare=False)

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
        return not self.path.startswith(NOT_THE_MODEL[1:])

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
        return " ".join(text.split())

    def __str__(self) -> str:
        if self.recorded:
            return self.function
        step = f" ({self.inside})" if self.inside else ""
        return f"{self.file}:{self.line} `{self.op}`{step}"

    @property
    def site(self) -> str:
        """Where the model calls the function, and for which module."""
        if self.caller is None:
            return ""
        path, line, name = self.caller
        where = "line " if path == self.path else f"{short_path(path)}:"
        # a number in a list goes with the name of the list
        found = re.search(r"[^.]+(\.\d+)*$", name)
        module = found[0] if found else ""
        return f", called from {where}{line}" + (
            f" ({module})" if module else ""
        )

    def to_dict(self) -> dict[str, object]:
        """Return what a reader of JSON needs."""
        names = ["file", "line", "function", "op", "inside", "layer", "module"]
        caller = (
            self.caller and f"{short_path(self.caller[0])}:{self.caller[1]}"
        )
        return {name: getattr(self, name) for name in names} | {
            "caller": caller
        }


def find_place(
    op: str,
    layers: Mapping[int, int],
    modules: Mapping[int, str],
    outermost: CodeType,
) -> tuple[Place, Stack]:
    """Return the place of what is being computed now, and the way to it.

    Args:
        op: what torch computes.
        layers: as `layers_of` returns them.
        modules: the name of each module by its id.
        outermost: the code of the function that runs the model; frames
            above it are not looked at.
    """
    stack: list[tuple[str, int]] = []
    own: FrameType | None = None
    torchs: FrameType | None = None
    caller: tuple[str, int, str] | None = None
    layer, module, called = None, "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        code = frame.f_code
        name = ""
        if code.co_varnames[:1] == ("self",):
            owner = id(frame.f_locals.get("self"))
            name = modules.get(owner, "")
            layer = layers.get(owner) if layer is None else layer
            module = module or name
        if not skipped(code.co_filename):
            if own is not None and caller is None:
                caller = (*_place_of(frame), called)
            if own is None:
                own, called = frame, name
            stack.append((code.co_filename, frame.f_lasti))
        elif code.co_name == "forward":
            torchs = torchs or frame
        frame = frame.f_back
    # a model of torch's own modules alone: the module's line
    own = own or torchs or sys._getframe(1)
    place = Place(
        os.path.abspath(own.f_code.co_filename),
        own.f_lineno,
        own.f_code.co_qualname.replace("<locals>.", ""),
        OPERATORS.get(op, op),
        layer,
        span=span_of(own.f_code, own.f_lasti),
        caller=caller,
        module=module,
    )
    return place, tuple(stack)


def _place_of(frame: FrameType) -> tuple[str, int]:
    return os.path.abspath(frame.f_code.co_filename), frame.f_lineno


@cache
def skipped(file: str) -> bool:
    """Whether a file is none of the model's."""
    return file.startswith("<") or os.path.abspath(file).startswith(
        NOT_THE_MODEL
    )


@cache
def short_path(path: str) -> str:
    """Return a path from the current folder, or from its package's."""
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
