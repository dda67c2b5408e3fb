"""The line that lets a token through to a score that it must not reach.

Numbers that belong to one position lie along an axis as long as the text. The
first operation whose numbers there depend on a later token is the culprit.
Scores of attention pair all positions, along two such axes, and none is hidden
yet: there it is the softmax, whose weights of a position depend on the keys
that are not hidden from it. A Fourier transform along the text mixes all of
it, everything that is cut off behind: the line that cuts is not to blame.
"""

import math

from torch import Tensor

from ..running.operations import UNSET
from ..running.places import Place
from .codes import plain
from .rules import FORMULAS
from .shadows import OUTSIDE, Step

FOURIER = ("_fft_r2c", "_fft_c2c", "_fft_c2r")
SOFTMAX = ("_softmax", "_safe_softmax", "_log_softmax")
# These copy numbers: a reader looks for the line before or after.
COPIES = ("clone", "_to_copy", "_unsafe_view", "copy", "detach", "alias")
# Numbers from elsewhere, and memory that the next operation reads or writes.
NO_LINE = (OUTSIDE, *UNSET)


class Tape:
    """The steps of a run whose numbers depend on a token too late.

    Args:
        allowed: the code of each row and position's own token.
        rows: whether codes tell rows apart, else positions.
        reverse: of the same run with rows in the opposite order, if of rows:
            a number of one row has two codes whose sum is the last row's.
    """

    views = True  # it is called with views as well

    def __init__(
        self, allowed: Tensor, rows: bool, reverse: "Tape | None" = None
    ):
        self.batch, self.time = allowed.shape
        self.allowed = allowed[:, 0] if rows else allowed.amax(0)
        self.each = allowed  # the rows of documents are unlike
        self.rows, self.reverse = rows, reverse
        self.codes: list[list[Tensor]] = []  # of all steps, if of rows
        self.steps: list[Step] = []
        self.late: int | None = None  # the first step with late numbers
        self.mixed: int | None = None  # the last transform of the whole text
        self.in_chunks = False  # whether the late numbers lie in these
        self.padded: set[int] = set()  # lengths of the text when it is padded

    def __call__(self, step: Step) -> None:
        """Keep a step, without its numbers."""
        found = list(zip(step.outs, step.codes, strict=True))
        if step.name in FORMULAS:
            found = found[:1]  # no formula gives the codes of the others
        self._note_padding(step)
        view = step.call is None
        step.outs, step.codes, step.call = [], [], None
        least = self.each.min()
        codes = [plain(c).expand(o.shape).cpu() for o, c in found]
        if self.rows:
            self.codes.append([plain(c).cpu() for _, c in found])
        if step.name in NO_LINE or not any((c > least).any() for c in codes):
            return
        softmax = step.name in SOFTMAX
        late = self.late is None and (
            self._mixes_rows()
            or (view and any(self._is_late(c, view) for c in codes))
            if self.rows
            else any(self._is_late(c, view, softmax) for c in codes)
        )
        if view and not late:
            return  # it is no line of the way
        self.steps.append(step)
        whole = all(bool((c > least).all()) for c in codes)
        if step.name in FOURIER and whole and self.late is None:
            self.mixed = len(self.steps) - 1
        if late:
            self.late = len(self.steps) - 1

    def _note_padding(self, step: Step) -> None:
        """Keep the length of a text that is padded on the right."""
        if step.call is None or step.name not in ("constant_pad_nd", "cat"):
            return
        call, time = step.call, len(self.allowed)
        source = call["self"] if "self" in call.args else call["tensors"][0]
        for before, after in zip(source.shape, call.out.shape, strict=False):
            if before == time < after:
                self.padded.add(after)

    def _mixes_rows(self) -> bool:
        """Whether a number of the last step depends on two rows."""
        if self.reverse is None:
            return False
        last = len(self.codes) - 1
        pairs = zip(self.codes[last], self.reverse.codes[last], strict=True)
        return any(bool((x + y > self.batch - 1).any()) for x, y in pairs)

    def _is_late(
        self, codes: Tensor, view: bool, softmax: bool = False
    ) -> bool:
        """Whether a number depends on a token later than its position."""
        both = self.batch * self.time
        if both in codes.shape and 1 not in (self.batch, self.time):
            axis = codes.shape.index(both)
            codes = codes.unflatten(axis, (self.batch, self.time))
        size = len(self.allowed)
        axes = [axis for axis, n in enumerate(codes.shape) if n == size]
        if softmax and axes[-1:] == [codes.dim() - 1]:
            axes.pop()  # over the keys: their axis is not a position's
        if not (axes or self.rows or view):  # a view may have heads there
            return self._is_late_in_chunks(codes)
        shifted = view and axes[-1:] == [codes.dim() - 1] and codes.dim() > 1
        if shifted and codes.size(-2) == size + 1:  # distances of keys
            return False
        if len(axes) != 1:
            return False
        if not self.rows and axes[0] > 0 and codes.size(0) == self.batch:
            along = codes.movedim(axes[0], 1).unsqueeze(-1).flatten(2)
            return bool((along.amax(2) > self.each).any())
        along = codes.movedim(axes[0], 0).reshape(size, -1).amax(1)
        return bool((along > self.allowed).any())

    def _is_late_in_chunks(self, codes: Tensor) -> bool:
        """Whether it does, of a padded text, maybe cut into equal chunks.

        The first axes are positions if each number there depends on its own.
        """
        size = len(self.allowed)
        for stop in range(1, codes.dim()):
            if math.prod(codes.shape[:stop]) in self.padded:
                along = codes.flatten(stop).flatten(0, stop - 1).amax(1)[:size]
                if bool((along >= self.allowed).all()):
                    self.in_chunks |= bool((along > self.allowed).any())
        return self.in_chunks

    def culprit(self) -> tuple[Place | None, list[Place]]:
        """Return the culprit, and it between the lines before and after."""
        if self.late is None:
            return None, []
        at = self.late if self.mixed is None else self.mixed
        place = self.steps[at].place

        def others(steps: list[Step]) -> list[Place]:
            kept = [s.place for s in steps if s.name not in COPIES]
            return [p for p in kept if p != place]

        before, after = others(self.steps[:at]), others(self.steps[at:])
        return place, [*before[-1:], place, *after[:1]]


def in_words(lines: list[Place]) -> str:
    """Return lines as a reader would write them: a file is named once."""
    texts, path = [], ""
    for place in lines:
        text = str(place)
        if place.path == path:
            text = text.removeprefix(place.file)
        texts.append(text)
        path = place.path
    return ", ".join(texts)
