"""Exceptions of a check, and of a user's mistake."""

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

# Frames that are not the user's: of the checks, of PyTorch, of Python.
KIT = Path(__file__).resolve().parents[1]
ROOMS = (  # they call a user's model
    *("running", "tracing", "proof", "invariants"),
    *("comparison", "distributed", "scoring"),
)
OURS = (
    *(str(KIT / room) for room in (*ROOMS, "cli")),
    *(str(KIT / f"{name}.py") for name in ("targets", "importing")),
    *(str(Path(m.__file__ or "").parent) for m in (torch, jaxtyping)),
    "<@beartype",  # the code of a shape check
)
PYTHON = (str(Path(traceback.__file__).parent), "<frozen")
FRAMES_SHOWN = 8  # of an exception, the innermost


class SkipCheck(Exception):
    """A check that does not apply to this model; the message says why."""


class ModelRaised(AssertionError):
    """The model raised where it should have answered; the cause is its own.

    An AssertionError, since inside a check it is a failure of the model.
    """


class NoTargetLeftOut(ModelRaised):
    """A loss counts targets that are marked as absent; check_loss says so."""


class FailureAt(AssertionError):
    """A failure, with the lines that it is about, the likeliest first."""

    def __init__(self, message: str, *places: "Place | None") -> None:
        super().__init__(message)
        self.places = [place for place in places if place is not None]


class NotFinite(FailureAt):
    """The scores are NaN or infinite."""


class WithFacts(FailureAt):
    """A failure with facts, by their names."""

    def __init__(
        self, message: str, *places: "Place | None", **facts: Any
    ) -> None:
        super().__init__(message, *places)
        self.facts = facts


class Leaked(WithFacts):
    """A position sees a later token: facts for a reader of JSON.

    Position, token, length, size, and file and line, if known.
    """


class FoundOut(WithFacts):
    """A failure that shows new values of a Subject's fields."""


class UnusableModel(ValueError):
    """The target cannot be built, called or read as a language model.

    The cause, where there is one, is the user's own exception.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the user's own frames, and a line."""
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
    """A size that a model does not say, and nobody gave."""


class OtherVocabulary(UnusableModel):
    """The vocabulary that was given is not the model's own.

    Attributes:
        has: which one the model has.
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
    """Return the file and line of the user's own that raised, or "".

    It is the innermost frame that is neither ours nor PyTorch's: none for
    what PyTorch raises in a backward pass.
    """
    frame = _their_frame(error)
    if frame is None:
        return ""
    return f"{_shown(frame.filename)}, line {frame.lineno}"


def _shown(file: str) -> str:
    """Return a source file from the current folder, or which cell it is."""
    if cell := cell_of(file):
        return f"Cell {cell}"
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


def _their_frame(error: BaseException) -> traceback.FrameSummary | None:
    return next(_their_frames(error), None)


def _their_frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of the user's own code, from the innermost."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    yield from (frame for frame in frames if is_theirs(frame.filename))


def places_in(error: BaseException | None) -> list[dict[str, Any]]:
    """Return the lines that an exception is about: each has a file and a line.

    The likeliest come first: those that a check found, then those where the
    user's own code raised, from the innermost.
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
    """Whether a source file is the user's: not ours, torch's or Python's."""
    python = file.startswith(PYTHON) and "-packages" not in file
    return not python and not file.startswith(OURS)


def with_their_frames(error: BaseException | None) -> BaseException | None:
    """Return an exception with the user's own frames alone, None for none."""
    if error is None:
        return None
    if isinstance(error.__context__, ModelRaised):  # of an earlier try
        error.__context__ = None
    kept: TracebackType | None = None
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if is_theirs(frame.f_code.co_filename):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return error.with_traceback(kept) if kept else None


def causes_of(
    error: BaseException, culprit: tuple[str, int] | None = None
) -> tuple[list[object], list[object]]:
    """Return what says that an earlier failure has the cause of this one.

    The start of the exception's sentence, without numbers, and its place: a
    crash at another length or in another dtype has the same cause. NaN scores
    have one cause, whichever check meets them. And the culprit, the line
    where a proof says that tokens or rows get through, if they do so in an
    earlier failure or if the model raised there: BatchNorm does all three.

    Returns:
        What to look for, and what a later failure is to look for.
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
    """A hook of the checks raised: no fault of the model."""
