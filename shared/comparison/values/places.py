"""Where a value is computed: source line, function, operation, layer."""

import linecache
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

SHARED = Path(__file__).resolve().parents[2]

# Folders whose frames are nobody's model: torch, what checks shapes, and
# the kit's own way from diff_by_value to the model.
NOT_THE_MODEL = (
    str(Path(torch.__file__).resolve().parent) + os.sep,
    str(SHARED / "invariants") + os.sep,
    str(SHARED / "comparison") + os.sep,
)
NOT_THE_MODEL_EITHER = re.compile(r"[\\/](jaxtyping|beartype|contextlib)\b")

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
    "index": "[]",
    "select": "[]",
    "slice": "[]",
    "index_put_": "[]=",
}

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
    """

    path: str
    line: int
    function: str
    op: str
    layer: int | None = None
    inside: str = ""
    span: tuple[int, int, int] = (0, 0, 0)

    @property
    def file(self) -> str:
        """The path as a reader would write it."""
        return short_path(self.path)

    @property
    def in_model(self) -> bool:
        """Whether the line is the model's, not the kit's own."""
        return not self.path.startswith(NOT_THE_MODEL[1:])

    @property
    def code(self) -> str:
        """The expression in the source, in one line."""
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
        step = f" ({self.inside})" if self.inside else ""
        return f"{self.file}:{self.line} `{self.op}`{step}"

    def to_dict(self) -> dict[str, object]:
        """Return what a reader of JSON needs."""
        names = ("file", "line", "function", "op", "inside", "layer")
        return {name: getattr(self, name) for name in names}


class Locator:
    """Finds the place of what is being computed now.

    Args:
        model: whose modules' names say the layer.
        outermost: the code of the function that runs the model; frames
            above it are not looked at.
    """

    def __init__(self, model: object, outermost: CodeType):
        self.outermost = outermost
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        self.names = {id(module): name for name, module in modules}
        self.layers = layers_of(model) if isinstance(model, nn.Module) else {}

    def find(self, op: str) -> tuple[Place, Stack]:
        """Return the nearest place outside torch, and the way to it."""
        stack: list[tuple[str, int]] = []
        own: FrameType | None = None
        torchs: FrameType | None = None
        module = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self.outermost:
            code = frame.f_code
            if module is None and code.co_varnames[:1] == ("self",):
                module = self.names.get(id(frame.f_locals.get("self")))
            if not skipped(code.co_filename):
                own = own or frame
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
            self.layers.get(module or ""),
            span=span_of(own.f_code, own.f_lasti),
        )
        return place, tuple(stack)


@cache
def span_of(code: CodeType, instruction: int) -> tuple[int, int, int]:
    """Return where an instruction's expression starts and ends."""
    positions = islice(code.co_positions(), instruction // 2, None)
    first, last, start, end = next(positions, (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return 0, 0, 0
    return start, end, last


@cache
def skipped(file: str) -> bool:
    """Whether a file is none of the model's."""
    if file.startswith("<"):
        return True
    path = os.path.abspath(file)
    return path.startswith(NOT_THE_MODEL) or bool(
        NOT_THE_MODEL_EITHER.search(path)
    )


@cache
def short_path(path: str) -> str:
    """Return a path from the current folder, or from its package's."""
    roots = [os.getcwd(), *sys.path]
    below = [
        os.path.relpath(path, root)
        for root in roots
        if root and path.startswith(os.path.join(os.path.abspath(root), ""))
    ]
    return min(below, key=len, default=path)


def layers_of(model: nn.Module) -> dict[str, int]:
    """Return for the name of each module within a layer the layer's number.

    Layers are the outermost container's members that have parts of their
    own and are of one class.
    """
    layers: dict[str, int] = {}
    for name, module in model.named_modules():
        if not isinstance(
            module, nn.ModuleList | nn.Sequential | nn.ModuleDict
        ):
            continue
        if name in layers:  # heads, experts: containers within a layer
            continue
        children = list(module.named_children())
        kinds = Counter(type(child) for _, child in children)
        kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
        if count < 2 and (len(children) > 1 or type(module) is nn.Sequential):
            continue
        layer = 0
        for child_name, child in children:
            if type(child) is kind and any(child.children()):
                inner = f"{name}.{child_name}".lstrip(".")
                for below, _ in child.named_modules(prefix=inner):
                    layers[below] = layer
                layer += 1
    return layers
