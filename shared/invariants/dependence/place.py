"""Where an operation is called: file, line, and the source there."""

import linecache
import os
import sys
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType

import jaxtyping
import torch

from ..model.arrays import code_of

WIDTH = 48  # of an expression in a sentence

PACKAGES = Path(torch.__file__).resolve().parents[1]
NOT_THE_MODEL = (
    # they turn tensors into their own arrays
    *(f"{PACKAGES / name}{os.sep}" for name in ("numpy", "jax", "mlx")),
    str(Path(torch.__file__).resolve().parent) + os.sep,
    str(Path(jaxtyping.__file__).resolve().parent) + os.sep,  # its wrappers
    str(Path(__file__).resolve().parents[1]) + os.sep,
)


@dataclass(frozen=True)
class Place:
    """A line of a model, and the operation that is called there.

    Attributes:
        path: of the file.
        line: number of the line.
        operation: as torch names it.
        span: columns of the expression, and its last line.
    """

    path: str
    line: int
    operation: str
    span: tuple[int, int, int] = (0, 0, 0)

    @property
    def file(self) -> str:
        """The file's name."""
        return os.path.basename(self.path)

    @property
    def code(self) -> str:
        """The expression as it is written, cut to a few words."""
        start, end, last = self.span
        text = linecache.getline(self.path, self.line)
        if end and last == self.line:
            text = text.encode()[start:end].decode(errors="replace")
        text = " ".join(text.split()) or self.operation
        if len(text) <= WIDTH:
            return text
        return f"{text[: WIDTH // 2]}...{text[-WIDTH // 2 :]}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} `{self.code}`"

    def to_dict(self) -> dict[str, str | int]:
        """Return what a reader of JSON needs."""
        return {
            "file": self.path,
            "line": self.line,
            "operation": self.operation,
            "code": self.code,
        }


def find_place(operation: str) -> Place:
    """Return the innermost line that is neither torch's nor the kit's."""
    frame = sys._getframe(1)
    own = torchs = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not _skipped(name):
            own = frame
            break
        if torchs is None and frame.f_code.co_name == "forward":
            torchs = frame
        frame = frame.f_back  # type: ignore[assignment]
    own = own or torchs or sys._getframe(1)
    code = own.f_code
    span = span_of(code, own.f_lasti)
    return Place(code.co_filename, own.f_lineno, operation, span)


def place_of_code(function: object) -> Place:
    """Return the line where a function, or a callable's class, is defined."""
    code = code_of(function)
    if code is None:
        return Place(type(function).__name__, 0, "call")
    return Place(code.co_filename, code.co_firstlineno, code.co_name)


@cache
def span_of(code: CodeType, instruction: int) -> tuple[int, int, int]:
    """Return an expression's columns and last line; 0: Python kept none."""
    positions = islice(code.co_positions(), instruction // 2, None)
    _, last, start, end = next(positions)
    return start or 0, end or 0, last or 0


@cache
def _skipped(file: str) -> bool:
    return file.startswith("<") or os.path.abspath(file).startswith(
        NOT_THE_MODEL
    )
