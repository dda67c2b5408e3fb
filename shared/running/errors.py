"""Define exceptions of a check, and report a user's mistake."""

import re
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jaxtyping
import torch

from ..notebooks import cell_of

if TYPE_CHECKING:
    from .places import Place

# Files that are not the user's code: those of the kit, PyTorch and Python.
KIT = Path(__file__).resolve().parents[1]
ROOMS = (  # the kit's packages that call a user's model
    *("running", "tracing", "proof", "invariants"),
    *("comparison", "distributed", "scoring"),
)
OURS = (
    *(str(KIT / room) for room in (*ROOMS, "cli")),
    *(str(KIT / f"{name}.py") for name in ("targets", "importing")),
    *(str(Path(m.__file__ or "").parent) for m in (torch, jaxtyping)),
    "<@beartype",  # code that the type checker beartype generates
)
PYTHON = (str(Path(traceback.__file__).parent), "<frozen")
FRAMES_SHOWN = 8  # most frames of an exception that a message shows


class SkipCheck(Exception):
    """Raised when a check does not apply to a model; the message says why."""


class ModelRaised(AssertionError):
    """Raised when the model raises; the cause is the model's exception.

    It is an AssertionError, because in a check it is a model's failure.
    """


class NoTargetLeftOut(ModelRaised):
    """Raised when a loss counts targets that are marked to be ignored."""


class FailureAt(AssertionError):
    """Raised with the lines that may be at fault, the likeliest first."""

    def __init__(self, message: str, *places: "Place | None") -> None:
        super().__init__(message)
        self.places = [place for place in places if place is not None]


class NotFinite(FailureAt):
    """Raised when scores are NaN or infinite."""


class WithFacts(FailureAt):
    """Raised for a failure with named facts, which a report shows."""

    def __init__(
        self, message: str, *places: "Place | None", **facts: Any
    ) -> None:
        super().__init__(message, *places)
        self.facts = facts


class Leaked(WithFacts):
    """Raised when a position sees a later token; a JSON report has the facts.

    The facts are position, token, length, size, and file and line if known.
    """


class FoundOut(WithFacts):
    """Raised for a failure; its facts give new values for Subject's fields."""


class UnusableModel(ValueError):
    """Raised if a target cannot be built, called or read as a language model.

    The cause, if there is one, is the exception of the user's code.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the user's frames, then one line."""
        lines = []
        if (cause := with_their_frames(self.__cause__)) is not None:
            frames = traceback.extract_tb(cause.__traceback__)
            for frame in frames:
                if cell := cell_of(frame.filename):
                    frame.filename = f"Cell {cell}"
            lines = [*frames.format(), *traceback.format_exception_only(cause)]
        lines.append(f"{type(self).__name__}: {self}")
        return [text.rstrip("\n") for text in lines]


class UnknownSize(UnusableModel):
    """Raised for a size that is neither given nor declared by the model."""


class OtherVocabulary(UnusableModel):
    """Raised if the given vocabulary size differs from the model's.

    Attributes:
        has: the vocabulary size of the model.
    """

    def __init__(self, given: str, has: str) -> None:
        super().__init__(f"{given}, but {has}")
        self.has = has


def sentence(error: BaseException) -> str:
    """Return an exception as one line: its class and its message."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:300]}" if text else name


def place_of(error: BaseException) -> str:
    """Return the file and line of the user's code that raised, or "".

    The place is the innermost frame that is neither the kit's nor PyTorch's.
    It is "" if PyTorch raises in a backward pass.
    """
    frame = _their_frame(error)
    if frame is None:
        return ""
    return f"{_shown(frame.filename)}, line {frame.lineno}"


def _shown(file: str) -> str:
    """Return a file relative to the current folder, or a notebook's cell."""
    if cell := cell_of(file):
        return f"Cell {cell}"
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


def _their_frame(error: BaseException) -> traceback.FrameSummary | None:
    return next(_their_frames(error), None)


def _their_frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of the user's code, the innermost first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    yield from (frame for frame in frames if is_theirs(frame.filename))


def places_in(error: BaseException | None) -> list[dict[str, Any]]:
    """Return the lines of code that an exception points to, with files.

    The likeliest come first: lines that a check found, then lines of the
    user's code that raised, from the innermost.
    """
    found: list[tuple[str, int | None]] = []
    while error is not None:
        if isinstance(error, FailureAt):
            found += [(_shown(at.path), at.line) for at in error.places]
        if isinstance(error, SyntaxError) and error.filename:
            found.append((_shown(error.filename), error.lineno))
        frames = islice(_their_frames(error), FRAMES_SHOWN)
        found += [(_shown(frame.filename), frame.lineno) for frame in frames]
        error = error.__cause__
    return [
        {"file": file, "line": line} for file, line in dict.fromkeys(found)
    ]


def is_theirs(file: str) -> bool:
    """Return whether a file is the user's: not the kit's or a library's."""
    python = file.startswith(PYTHON) and "-packages" not in file
    return not python and not file.startswith(OURS)


def with_their_frames(error: BaseException | None) -> BaseException | None:
    """Return an exception with only the user's frames; None if it has none."""
    if error is None:
        return None
    # do not show the exception of an earlier attempt
    if isinstance(error.__context__, ModelRaised):
        error.__context__ = None
    kept: TracebackType | None = None
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if is_theirs(frame.f_code.co_filename):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return error.with_traceback(kept) if kept else None


def causes_of(
    error: BaseException, culprit: tuple[str, int] | None = None
) -> tuple[list[object], list[object]]:
    """Return keys that show whether two failures have the same cause.

    One key is the exception's place and the start of its message, without
    numbers. So crashes at other lengths share a cause. NaN scores count as one
    cause in all checks. Another key is the line where tokens or rows leak,
    according to a proof. Two failures also share a cause if the earlier one
    was raised at this line.

    Returns:
        The keys to look up among earlier failures, and the keys to record.
    """
    first = error.__cause__ or error
    words = re.sub(r"\d+", "", sentence(first))[:60] + place_of(first)
    if isinstance(error, NotFinite):
        words = NotFinite.__name__
    if culprit is not None:
        through = ("through", *culprit)
        return [words, through, ("raised", *culprit)], [words, through]
    frame = _their_frame(first)
    at = [("raised", frame.filename, frame.lineno)] if frame else []
    return [words], [words, *at]


class HookRaised(Exception):
    """Raised if a hook of the checks raises, so the model is not at fault."""
