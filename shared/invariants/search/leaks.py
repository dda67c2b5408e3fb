"""The search for a leak: trials, confirmation, and its smallest case."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..model.subject import Model, Subject
from ..model.tokens import SMALL, draw, others
from ..pictures import levels, text_map
from .influence import influence_of
from .place import first_seen
from .rounding import FLOOR, floor_of, gaps, is_real, rounding, rows_at_once

DROPOUT_SEED = 1234
MAP = 8  # tokens in the map of a leak, where it is as short


@dataclass(frozen=True)
class Mode:
    """One way to call a model.

    Attributes:
        words: what a failure says about it.
        training: whether in train mode, each call with the same seed.
        grad: whether gradients are recorded.
        padded: None: no mask is given; else the share of each sequence that
            an attention mask hides on the left.
    """

    words: str = ""
    training: bool = False
    grad: bool = False
    padded: float | None = None


@dataclass(frozen=True)
class Trial:
    """Sequences that differ from others from a split on, row by row."""

    base: Int[Tensor, "rows time"]
    changed: Int[Tensor, "rows time"]
    splits: list[int]
    mode: Mode

    @property
    def start(self) -> int:
        """First position that no mask hides."""
        return int((self.mode.padded or 0.0) * self.base.size(1))


@dataclass(frozen=True)
class Leak:
    """A confirmed one: in this row the position sees what follows it."""

    trial: Trial
    row: int
    position: int
    size: float
    noise: float
    dtype: str


class _Suspicious(Exception):
    """Two calls differ before the split, in a model's own precision."""


class NotFinite(Exception):
    """A copy with larger weights has scores that are NaN or infinite."""


@dataclass
class Search:
    """Looks for positions that see the future, in one copy of a model.

    Attributes:
        subject: the model's description.
        model: the copy, which no other check uses.
        weights: what a failure says about the copy's weights.
        finite_only: whether to raise NotFinite for scores that are not: it
            is no fault of a model to overflow under weights it never had.
        lazy: whether the model is in its own precision until two calls
            differ where they should not: equal shapes round alike, so that
            any difference at all is reason to go on in float64.
        moved: whether any change has moved any score: if none does, nothing
            has been shown.
        mixed: whether rows were seen to depend on each other.
        unsteady: whether draws in train mode depend on the tokens.
    """

    subject: Subject
    model: Model
    weights: str = ""
    finite_only: bool = False
    lazy: bool = False
    moved: bool = False
    mixed: bool = False
    unsteady: bool = False
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def run(self, tokens: Int[Tensor, "rows time"], mode: Mode) -> Tensor:
        """Call the model on ids; in train mode always from one state."""
        mask = None
        if mode.padded is not None:
            mask = torch.ones_like(tokens)
            mask[:, : int(mode.padded * tokens.size(1))] = 0
            mask = mask.to(self.subject.device)
        if mode.training:
            self._reset_buffers()
        scores = self.subject.scores(
            self.model,
            tokens.to(self.subject.device),
            training=mode.training,
            grad=mode.grad,
            seed=DROPOUT_SEED if mode.training else None,
            mask=mask,
        )
        scores = scores.detach()
        if self.finite_only and not bool(torch.isfinite(scores).all()):
            raise NotFinite
        return scores

    def _reset_buffers(self) -> None:
        if not isinstance(self.model, nn.Module):
            return
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name not in self._buffers:
                    self._buffers[name] = buffer.clone()
                elif self._buffers[name].shape == buffer.shape:
                    buffer.copy_(self._buffers[name])

    def find(self, trial: Trial) -> Leak | None:
        """Return a leak that this trial shows, or None."""
        try:
            return self._find(trial)
        except _Suspicious:
            self.lazy = False
            self._buffers.clear()
            self.model = self.subject.doubled(self.model)
            return self._find(trial)

    def _find(self, trial: Trial) -> Leak | None:
        rows, time = trial.base.shape
        at_once = min(rows, rows_at_once(self.subject, time))
        same = bool((trial.base == trial.base[0]).all())
        base_scores = None
        for first in range(0, rows, at_once):
            # the last batch is filled up: only equal shapes round alike
            index = [min(first + i, rows - 1) for i in range(at_once)]
            part = replace(
                trial,
                base=trial.base[index],
                changed=trial.changed[index],
                splits=[trial.splits[i] for i in index],
            )
            if base_scores is None or not same:
                base_scores = self.run(part.base, trial.mode)
            leak = self._compare(part, base_scores)
            if leak is not None:
                return leak
        return None

    def _compare(self, trial: Trial, base_scores: Tensor) -> Leak | None:
        scores = self.run(trial.changed, trial.mode)
        moved = gaps(scores, base_scores).cpu()
        del scores
        before = torch.zeros_like(moved, dtype=torch.bool)
        for row, split in enumerate(trial.splits):
            before[row, trial.start : split] = True
        suspicious = moved.masked_fill(~before, 0.0).amax(1)
        if not self.moved:
            after = moved.masked_fill(before, 0.0).amax()
            self.moved = bool(after > _least(base_scores))
        if not suspicious.any():
            return None
        if self.lazy:
            raise _Suspicious
        noise = rounding(base_scores)
        rows = suspicious.argsort(descending=True)[:3].tolist()
        for row in rows:
            if suspicious[row] > _least(base_scores):
                leak = self._confirm(trial, row, noise)
                if leak is not None:
                    return leak
        return None

    def _confirm(self, trial: Trial, row: int, noise: float) -> Leak | None:
        """Change the one row alone, and ask whether it is more than noise."""
        steady = not trial.mode.training or self.same_draws(
            trial.base, trial.changed, trial.mode
        )
        alone = trial.base.clone()
        alone[row] = trial.changed[row]
        trial = replace(trial, changed=alone)
        if trial.mode.training and not self.same_draws(
            trial.base, trial.changed, trial.mode
        ):
            self.unsteady = True
            return None
        scope = slice(trial.start, trial.splits[row])

        def difference() -> Tensor:
            base = self.run(trial.base, trial.mode)[row, scope]
            return self.run(trial.changed, trial.mode)[row, scope] - base

        delta = difference()
        moved = gaps(delta, torch.zeros_like(delta))
        position = int(moved.argmax())
        size = float(moved[position])
        if size <= floor_of(delta.dtype) * noise:
            # other rows did it, another check's matter, or their draws
            self.mixed |= steady
            self.unsteady |= not steady
            return None
        if not is_real(self.model, lambda: difference()[position], noise):
            return None
        return Leak(
            trial,
            row,
            position + trial.start,
            size,
            noise,
            str(delta.dtype).removeprefix("torch."),
        )

    def same_draws(
        self,
        base: Int[Tensor, "rows time"],
        changed: Int[Tensor, "rows time"],
        mode: Mode,
    ) -> bool:
        """Whether both calls draw random numbers of the same shapes.

        If not (a dropout inside experts, whose batches depend on the
        tokens), the same seed gives earlier positions other draws.
        """
        draws = []
        for tokens in (base, changed):
            with _Draws() as seen:
                self.run(tokens, mode)
            draws.append(seen.shapes)
        return draws[0] == draws[1]

    def smallest(self, leak: Leak) -> Leak:
        """Return the leak at the smallest length, from a single token."""
        vocab, generator = self.subject.vocab_size, torch.Generator()
        generator.manual_seed(self.subject.seed)
        trial = leak.trial
        row = trial.base[leak.row]
        found = None
        for time in range(2, min(SMALL, row.numel() - 1) + 1):
            for base in (
                draw(vocab, 1, time, generator, repeats=False)[0],
                row[:time],
            ):
                changed = others(base, vocab, generator)
                found = found or self.single(base, changed, trial.mode, 1)
        if found is None:
            split = trial.splits[leak.row]
            found = self.single(
                row, trial.changed[leak.row], trial.mode, split
            )
        return found or leak

    def single(
        self,
        base: Int[Tensor, "time"],
        changed: Int[Tensor, "time"],
        mode: Mode,
        first: int,
    ) -> Leak | None:
        """Return a leak from changing one token only, or None."""
        time = base.numel()
        splits = list(range(first, time))
        rows = base.repeat(len(splits), 1)
        other = rows.clone()
        for i, split in enumerate(splits):
            other[i, split] = changed[split]
        return self.find(Trial(rows, other, splits, mode))

    def explain(self, leak: Leak) -> AssertionError:
        """Return the failure, with its smallest case, place and map."""
        leak = self.smallest(leak)
        trial, row = leak.trial, leak.row
        base, changed = trial.base[row], trial.changed[row]
        time = base.numel()
        differing = (base != changed).nonzero().flatten().tolist()
        token = differing[0]
        if len(differing) == 1:
            what = (
                f"position {leak.position} sees token {token}: at length "
                f"{time}, changing token {token} from {int(base[token])} to "
                f"{int(changed[token])}"
            )
        else:
            what = (
                f"position {leak.position} sees the tokens from {token} on: "
                f"at length {time}, redrawing tokens {token} to "
                f"{differing[-1]}"
            )
        how = "".join(
            f", {words}" for words in (trial.mode.words, self.weights) if words
        )
        text = (
            f"{what} moves the scores of position {leak.position} by "
            f"{leak.size:.2g} ({leak.dtype}{how}; rounding there is "
            f"{leak.noise:.1g})"
        )
        if len(trial.base) > 1 and not self._alone(leak):
            text += f", in row {row} of a batch of {len(trial.base)}"
        place = None
        if isinstance(self.model, nn.Module):
            place = first_seen(
                self.model,
                lambda tokens: self.run(tokens, trial.mode),
                trial.base,
                trial.changed,
                row,
                leak.position + 1,
                FLOOR * leak.noise / max(leak.size, leak.noise),
            )
        if place is not None:
            text += f"; first seen at {place}"
        if time <= SMALL:
            text += f"; tokens {' '.join(map(str, base.tolist()))}"
        error = AssertionError(text)
        if time <= 2 * SMALL:
            error.add_note(text_map(self._map(base, trial.mode)))
        return error

    def _map(self, ids: Int[Tensor, "time"], mode: Mode) -> Tensor:
        """Return the influence matrix, of eight tokens if they leak, too."""
        longer = min(MAP, self.subject.block_size) - ids.numel()
        maps = []
        for more in {max(0, longer), 0}:
            generator = torch.Generator().manual_seed(self.subject.seed)
            rest = draw(self.subject.vocab_size, 1, more, generator)[0]
            maps.append(
                influence_of(
                    lambda tokens: self.run(tokens, mode),
                    torch.cat([ids, rest]),
                    self.subject,
                )
            )
        maps.sort(key=len)
        return maps[-1] if bool(levels(maps[-1]).triu(1).any()) else maps[0]

    def _alone(self, leak: Leak) -> bool:
        """Whether the row leaks as the only one, too."""
        trial, row = leak.trial, leak.row
        split = trial.splits[row]
        one = Trial(
            trial.base[row : row + 1],
            trial.changed[row : row + 1],
            [split],
            trial.mode,
        )
        return self.find(one) is not None


def _least(scores: Tensor) -> float:
    """Return the smallest difference that is looked at."""
    return floor_of(scores.dtype) * rounding(scores)


class _Draws(TorchDispatchMode):
    """Records the shapes of all random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            first = answer[0] if isinstance(answer, tuple) else answer
            shape = tuple(getattr(first, "shape", ()))
            self.shapes.append((str(func), shape))
        return answer
