"""Find the line through which a token reaches a forbidden score.

If an axis of a tensor is as long as the text, each index on it is a position.
An entry is late if it depends on a token after its position. The culprit is
the first operation with late results. Attention scores do not count, because
they pair all positions before a mask hides some. So in attention the culprit
is the softmax. A Fourier transform along the text mixes all positions, so it
is the culprit.

A later step may hide late entries. So each suspect is tested: the model runs
again as if the suspect's results depended on no token. If the token then no
longer reaches the score, the suspect is the culprit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ..running.operations import UNSET, tensors_in
from ..running.places import Place
from .call import Call
from .codes import plain
from .rules import FORMULAS
from .shadows import OUTSIDE, Step

FOURIER = ("_fft_r2c", "_fft_c2c", "_fft_c2r")
SOFTMAX = ("_softmax", "_safe_softmax", "_log_softmax")
# Operations that only copy entries. Reports leave out their lines.
COPIES = ("clone", "_to_copy", "_unsafe_view", "copy", "detach", "alias")
# Operations that move entries along the text. The culprit may be a line that
# reads the result.
MOVES = ("constant_pad_nd", "roll", "cat", "index", "gather", "index_select")
SUSPECTS = 12  # most suspects to keep
# Operations that only create memory or bring in a tensor: never the culprit.
NO_LINE = (OUTSIDE, *UNSET)


Line = tuple[str, str, int, str]  # operation, file, line, function


def line_of(step: Step) -> Line:
    """Return a key that is equal for the same line in different layers."""
    place = step.place
    return step.name, place.path, place.line, place.code


@dataclass
class Suspect:
    """A step (an operation that ran) whose results depend on later tokens.

    Attributes:
        line: the operation and its source line, a key from `line_of`.
        at: the step's index in `Tape.steps`.
        outs: the step's results.
        in_chunks: whether late entries are in the chunks of a padded text.
        passed_on: for softmax weights or indices, the results of equal shape
            that later steps compute from them.
        readers: the steps that read a result of this step.
    """

    line: Line
    at: int
    outs: list[Tensor]
    in_chunks: bool = False
    passed_on: list[Tensor] = field(default_factory=list)
    readers: list["Suspect"] = field(default_factory=list)


def _memory(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Cut:
    """A tape (called with each step) that clears the codes of one line."""

    views = True  # views are passed to this tape as well

    def __init__(self, line: Line):
        """Keep the line, a key from `line_of`."""
        self.line = line

    def __call__(self, step: Step) -> bool:
        """Return whether to let a step's results depend on no token."""
        return line_of(step) == self.line


class Tape:
    """Records the steps of a run, and the suspects among them.

    Args:
        allowed: for each row and position, the code of the token there.
        rows: whether codes stand for rows instead of positions.
        reverse: for rows, the tape of the same run in the opposite order. If a
            number depends on only one row, its codes in the two runs add up to
            the last row's code.
    """

    views = True  # views are passed to this tape as well

    def __init__(
        self, allowed: Tensor, rows: bool, reverse: "Tape | None" = None
    ):
        self.batch, self.time = allowed.shape
        self.allowed = allowed[:, 0] if rows else allowed.amax(0)
        self.each = allowed  # for each row, because documents differ by row
        self.rows, self.reverse = rows, reverse
        self.codes: list[list[Tensor]] = []  # of all steps; empty unless rows
        self.steps: list[Step] = []
        self.suspects: list[Suspect] = []
        self.blamed: Suspect | None = None
        self.mixed: int | None = None  # step of the last Fourier transform
        self.padded: set[int] = set()  # lengths to which the text was padded

    def __call__(self, step: Step) -> None:
        """Record a step, and free the memory of its results."""
        found = list(zip(step.outs, step.codes, strict=True))
        if step.name in FORMULAS:
            found = found[:1]  # a formula computes only the first result
        self._note_padding(step)
        outs, call, view = step.outs, step.call, step.call is None
        step.outs, step.codes, step.call = [], [], None
        least = self.each.min()
        codes = [plain(c).expand(o.shape).cpu() for o, c in found]
        if self.rows:
            self.codes.append([plain(c).cpu() for _, c in found])
        if step.name in NO_LINE or not any((c > least).any() for c in codes):
            return
        made = Suspect(line_of(step), len(self.steps), outs)
        known = any(made.line == s.line for s in self.suspects)
        late = not known and self._is_suspect(step.name, codes, view, made)
        if view and not late:
            return  # no view brings in a later token
        self.steps.append(step)
        self._note_reader(call, made)
        whole = all(bool((c > least).all()) for c in codes)
        if step.name in FOURIER and whole and not self.suspects:
            self.mixed = made.at
        if late:
            self.suspects.append(made)
            self.blamed = self.blamed or made

    def _is_suspect(
        self, name: str, codes: list[Tensor], view: bool, made: Suspect
    ) -> bool:
        """Return whether a step with these codes may be the culprit."""
        if len(self.suspects) >= (1 if self.rows else SUSPECTS):
            return False
        softmax = name in SOFTMAX
        if self.rows:
            late = view and any(self._is_late(c, view) for c in codes)
            return late or self._mixes_rows()
        if any(self._is_late(c, view, softmax) for c in codes):
            return True
        if not view or name == "_unsafe_view":  # ends a matrix product
            made.in_chunks = any(map(self._is_late_in_chunks, codes))
        return made.in_chunks

    def _note_reader(self, call: Call | None, made: Suspect) -> None:
        """Add a step to the readers of each suspect that it reads."""
        given = () if call is None else call.args.values()
        read = _memory(tensors_in(given))
        for suspect in self.suspects if read else ():
            if _memory([*suspect.outs, *suspect.passed_on]) & read:
                suspect.readers.append(made)
                chooses = self._chooses(suspect)
                if chooses and made.outs[0].shape == suspect.outs[0].shape:
                    suspect.passed_on += made.outs

    def _note_padding(self, step: Step) -> None:
        """Record the length of a text that is padded on the right."""
        if step.call is None or step.name not in ("constant_pad_nd", "cat"):
            return
        call, time = step.call, len(self.allowed)
        source = call["self"] if "self" in call.args else call["tensors"][0]
        for before, after in zip(source.shape, call.out.shape, strict=False):
            if before == time < after:
                self.padded.add(after)

    def _mixes_rows(self) -> bool:
        """Return whether a number of the last step depends on two rows."""
        if self.reverse is None:
            return False
        last = len(self.codes) - 1
        pairs = zip(self.codes[last], self.reverse.codes[last], strict=True)
        return any(bool((x + y > self.batch - 1).any()) for x, y in pairs)

    def _is_late(
        self, codes: Tensor, view: bool, softmax: bool = False
    ) -> bool:
        """Return whether a number depends on a token after its position."""
        both = self.batch * self.time
        if both in codes.shape and 1 not in (self.batch, self.time):
            axis = codes.shape.index(both)
            codes = codes.unflatten(axis, (self.batch, self.time))
        size = len(self.allowed)
        axes = [axis for axis, n in enumerate(codes.shape) if n == size]
        if softmax and axes[-1:] == [codes.dim() - 1]:
            axes.pop()  # the last axis is the keys', not the queries'
        shifted = view and axes[-1:] == [codes.dim() - 1] and codes.dim() > 1
        # the relative shift of Transformer-XL, a view that only moves scores
        if shifted and codes.size(-2) == size + 1:
            return False
        if len(axes) != 1:
            return False
        if not self.rows and axes[0] > 0 and codes.size(0) == self.batch:
            along = codes.movedim(axes[0], 1).unsqueeze(-1).flatten(2)
            return bool((along.amax(2) > self.each).any())
        along = codes.movedim(axes[0], 0).reshape(size, -1).amax(1)
        return bool((along > self.allowed).any())

    def _is_late_in_chunks(self, codes: Tensor) -> bool:
        """Return whether a chunk of a padded text depends on a later token.

        Adjacent axes, such as (chunk, place), are taken for positions if each
        entry depends on its own token or a later one.
        """
        size, shape = len(self.allowed), codes.shape
        if size in shape:
            return False
        for start in range(codes.dim()):
            for stop in range(start + 1, codes.dim() + 1):
                if math.prod(shape[start:stop]) not in self.padded:
                    continue
                along = codes.flatten(start, stop - 1).movedim(start, 0)
                along = along.flatten(1).amax(1) if along.dim() > 1 else along
                along = along[:size]
                if stop == start + 1 and bool((along == along[0]).all()):
                    continue  # all codes are equal: an axis of features
                if bool((along >= self.allowed).all()):
                    return bool((along > self.allowed).any())
        return False

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the suspects, and of the steps that read them."""
        for suspect in self.suspects:
            yield suspect.line
            yield from (reader.line for reader in suspect.readers)

    def blame(self, closes: Callable[[Line], bool]) -> None:
        """Choose the culprit among the suspects, and keep it in `blamed`.

        The first suspect that closes the path is the candidate. If it only
        moves entries, take the reader that closes the path instead. If it uses
        softmax weights or indices, take the step that computed these.

        Args:
            closes: whether the token no longer reaches the score if a line's
                results depend on no token.
        """
        if self.rows or self.mixed is not None:
            return
        first = next((s for s in self.suspects if closes(s.line)), None)
        if first is None:
            return
        self.blamed = first
        if self.steps[first.at].name in MOVES:
            readers = [s for s in first.readers if closes(s.line)]
            if len(readers) == 1 < len(first.readers):
                self.blamed = readers[0]
        for suspect in self.suspects:
            reads = any(first.line == r.line for r in suspect.readers)
            reads |= bool(_memory(first.outs) & _memory(suspect.outs))
            if self._chooses(suspect) and reads and suspect.at < first.at:
                self.blamed = suspect
                return

    def _chooses(self, suspect: Suspect) -> bool:
        """Return whether a suspect computes softmax weights or indices."""
        soft = self.steps[suspect.at].name in SOFTMAX
        return soft or not suspect.outs[0].is_floating_point()

    @property
    def in_chunks(self) -> bool:
        """Return whether the leak is in the chunks of a padded text."""
        return self.blamed is not None and self.blamed.in_chunks

    def culprit(self) -> tuple[Place | None, list[Place]]:
        """Return the culprit, and a list of up to three lines around it."""
        if self.blamed is None:
            return None, []
        at = self.blamed.at if self.mixed is None else self.mixed
        place = self.steps[at].place

        def others(steps: list[Step]) -> list[Place]:
            kept = [s.place for s in steps if s.name not in COPIES]
            return [p for p in kept if p != place]

        before, after = others(self.steps[:at]), others(self.steps[at:])
        return place, [*before[-1:], place, *after[:1]]


def in_words(lines: list[Place]) -> str:
    """Return a list of lines in words, with each file named once."""
    texts, path = [], ""
    for place in lines:
        text = str(place)
        if place.path == path:
            text = text.removeprefix(place.file)
        texts.append(text)
        path = place.path
    return ", ".join(texts)
