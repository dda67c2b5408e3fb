"""Draw and run texts, and confirm leaks.

Two texts that are equal up to a split must have equal scores before it. They
run in batches of equal shape. The message on a leak is written in
checks/causality/message.py.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..proof.proof import Proof
from ..running.errors import SkipCheck
from ..running.model.sizes import all_declared, padding_ids, special_ids
from ..running.rounding import (
    floor_of,
    gaps,
    is_real,
    minus,
    require_finite,
    rounding,
)
from ..running.subject import Subject
from ..running.tokens import SHORT, SPLITS, draw, others, splits_to_try
from ..running.variant import (
    Variant,
    copy_for,
    double_on_suspicion,
    larger,
    own,
)
from ..running.ways import (
    CAUSALITY,
    CROWD_TIME,
    DOUBLE,
    ENLARGED,
    EVAL,
    LOSSES,
    TRAIN,
    Case,
    cases_of,
    followed_cases,
    usual_lengths,
)
from ..tracing.moved import moves
from ..validation import dtype_name
from ..visibility import Declared, takes_tokens
from .other_paths import Crossing, crossings

TWO_PATHS = "texts that take two paths"
EACH_ID = 1 << 22  # most scores in `each_id`: tried ids times vocabulary
MARKS = ("eos_token_id", "bos_token_id")  # ids that may be padding
EVERY = 64  # most tokens of a text in which all positions are tried
LONGEST_TABLE = 4096  # largest table of masks for which a longer text is tried
# shares of the remaining time: for trials of an open case, and for all others
AT_ONCE, AFTER = 1 / 2, 1 / 6


@dataclass(frozen=True)
class Trial:
    """Pairs of texts, equal up to a split, for one copy of the model."""

    variant: Variant
    base: Int[Tensor, "rows time"]
    changed: Int[Tensor, "rows time"]
    splits: list[int]  # the first differing position in each row
    name: str = ""  # added to the case's name in a report
    share: float = 1.0  # largest share of the check's remaining time
    # the positions whose scores must not change; None: before the splits
    still: Bool[Tensor, "rows time"] | None = None
    crossing: Crossing | None = None  # set if the texts take different paths

    @property
    def time(self) -> int:
        """Return the number of tokens of a text."""
        return self.base.size(1)

    @property
    def label(self) -> str:
        """Return the trial's name in a report."""
        paths = TWO_PATHS * (self.crossing is not None)
        return ", ".join(
            filter(None, (self.variant.case.name, self.name, paths))
        )

    @property
    def before(self) -> Bool[Tensor, "rows time"]:
        """Return the positions at which scores must not change."""
        if self.still is not None:
            return self.still
        shown = self.variant.case.shown(*self.base.shape)
        declared = self.variant.subject.sees
        if declared is not None:
            return shown & unseen(declared, self.base, self.changed)
        at = torch.arange(self.time)
        return shown & (at < torch.tensor(self.splits).unsqueeze(1))

    def some(self, rows: list[int]) -> "Trial":
        """Return a trial with only these rows of the texts."""
        return replace(
            self,
            base=self.base[rows],
            changed=self.changed[rows],
            splits=[self.splits[i] for i in rows],
            still=None if self.still is None else self.still[rows],
        )


def unseen(
    declared: Declared,
    base: Int[Tensor, "rows time"],
    changed: Int[Tensor, "rows time"],
) -> Bool[Tensor, "rows time"]:
    """Return the positions that see none of the changed tokens."""
    relations = declared.of(base), declared.of(changed)
    differ = (base != changed).unsqueeze(1).cpu()
    seen = [(relation & differ).any(2) for relation in relations]
    same = (relations[0] == relations[1]).all(2)
    return same & ~seen[0] & ~seen[1]


@dataclass(frozen=True)
class Evidence:
    """The facts of a confirmed leak: a position sees a later token."""

    trial: Trial
    row: int
    position: int
    size: float
    noise: float
    dtype: str


class LeakFinder:
    """Finds leaks, and records other facts about the model."""

    moved = False  # whether any change of a token moved a score
    rows_mix = False  # whether rows depended on each other
    draws_differ = False  # whether random draws in train mode vary by tokens
    two_paths = False  # whether texts with different paths were compared

    def __init__(self) -> None:
        # the splits that were tried, by label and length
        self.tried: dict[str, dict[int, set[int]]] = {}

    def find(self, trial: Trial) -> Evidence | None:
        """Return a leak that a trial (pairs of texts) shows, or None."""
        variant = trial.variant
        for moved in moves(variant, trial.base, trial.changed):
            part = trial.some(moved.rows)
            tried = self.tried.setdefault(trial.label, {})
            tried.setdefault(trial.time, set()).update(part.splits)
            self.two_paths |= trial.crossing is not None
            after = moved.by.masked_fill(part.before, 0.0)
            self.moved |= bool(after.amax() > moved.least)
            early = moved.by.masked_fill(~part.before, 0.0).amax(1)
            if not early.any():
                continue
            if variant.copy.rough:  # so far in the model's own precision
                with variant.subject.budget.overtime():
                    double_on_suspicion(variant)
                    return self.find(trial)
            for row in early.argsort(descending=True)[:3].tolist():
                if not early[row] > moved.least:
                    break
                with variant.subject.budget.overtime():
                    leak = self._confirm(part, row, rounding(moved.base))
                if leak is not None:
                    return leak
        return None

    def _confirm(
        self, trial: Trial, row: int, noise: float
    ) -> Evidence | None:
        """Change only this row, and test whether the leak exceeds rounding."""
        variant = trial.variant
        training = variant.case.training
        steady = not training or _same_draws(trial)
        changed = trial.base.clone()
        changed[row] = trial.changed[row]
        trial = replace(trial, changed=changed)
        if training and not _same_draws(trial):
            self.draws_differ = True
            return None
        scope = trial.before[row].nonzero()[:, 0]

        def difference() -> Tensor:
            base = variant.scores(trial.base)[row, scope]
            return minus(variant.scores(changed)[row, scope], base)

        delta = difference()
        moved = gaps(delta, torch.zeros_like(delta))
        position = int(moved.argmax())
        size = float(moved[position])
        if math.isinf(size):
            base = variant.scores(trial.base)[row, scope]
            require_finite(base, infinite=True)
        if size <= floor_of(delta.dtype) * noise:
            # this row alone moves no score: other rows or their random numbers
            # did, which other checks report
            self.rows_mix |= steady
            self.draws_differ |= not steady
            return None
        if not is_real(variant.model, lambda: difference()[position], noise):
            return None
        at, dtype = int(scope[position]), dtype_name(delta.dtype)
        return Evidence(trial, row, at, size, noise, dtype)


def _same_draws(trial: Trial) -> bool:
    draws = trial.variant.draws
    return draws(trial.base) == draws(trial.changed)


def trials(subject: Subject, proof: Proof) -> Iterator[Trial]:
    """Yield trials (pairs of texts); those that find most leaks come first.

    If the proof is open in a case (a way to call the model), this case is
    tested: as the proof ran it, in float64, and with larger weights. If the
    proof is complete, a few trials test its rules, and others the cases that a
    proof cannot follow.
    """
    drawn = _Texts(subject)
    exact = [replace(case, dtype=DOUBLE.dtype) for case in (EVAL, TRAIN)]
    if subject.is_program:
        exact = [EVAL]
    few = subject.fit(2, 3, 5, 8, SHORT, subject.block_size)
    first = () if proof.position is None else (proof.position,)
    if proof.at is not None and proof.worn is not None:
        yield from drawn.of_run(proof.worn, proof.at[1], AT_ONCE, first)
    elif proof.at is not None:
        case, time = proof.at
        double = replace(case, dtype=DOUBLE.dtype)
        as_it_is = () if case.dtype or case.losses else (double,)
        yield from drawn.of((*as_it_is, case), [time], AT_ONCE, first)
        sizes = [replace(double, size=c.size) for c in ENLARGED]
        if as_it_is and not case.frozen:
            yield from drawn.of(sizes, [time], AT_ONCE, first)
    if proof.forks and subject.sees is None:
        yield from drawn.on_two_paths()
    whole = proof.proved and not proof.partial
    if whole:
        rest = [] if subject.heavy else [subject.block_size]
        few = subject.fit(3, SHORT, *rest)
        yield from drawn.of(exact, few)
        if not subject.heavy:
            yield from drawn.of(ENLARGED[1:], few)
        crowd = [c for c in followed_cases(subject) if c.crowd]
        yield from drawn.of(crowd, [CROWD_TIME], 1 / 40)
    else:
        yield from drawn.of(exact[:1], few)
        yield from drawn.each_id()
        yield from drawn.of(exact[1:], few)
        yield from drawn.of(ENLARGED, few)
        cases = [EVAL, TRAIN, *followed_cases(subject)]
        if subject.is_program:
            cases = []
        yield from drawn.of([c for c in cases if c.rows == 1], few)
        crowd = [c for c in cases if c.crowd]
        yield from drawn.of(crowd, [CROWD_TIME])
    if LOSSES in cases_of(CAUSALITY, subject):
        # 3 tokens: a loss of shifted targets needs one token more
        yield from drawn.of([LOSSES], subject.fit(3, 8))
    yield from drawn.past_buffers()
    if not whole:
        model = own(subject).model
        long = usual_lengths(subject, model, subject.block_size)
        rest = sorted({*long} - {*few}, reverse=True)
        yield from drawn.of(exact, rest)


class _Texts:
    """Draws pairs of texts that are equal up to a split.

    Each case (way to call the model) has a new copy, because some models
    change themselves when they are called.
    """

    def __init__(self, subject: Subject):
        self.subject, self.generator = subject, subject.generator()
        model, vocab = own(subject).model, subject.vocab_size
        said = {size.value for size in all_declared(model, MARKS)}
        ids = {0, vocab - 1, *padding_ids(model), *said}
        self.marks = sorted(ids & {*range(vocab)})  # ids that may be padding
        self.special = special_ids(model, vocab)

    def of(
        self,
        cases: Iterable[Case],
        lengths: list[int],
        share: float = AFTER,
        first: Sequence[int] = (),
    ) -> Iterator[Trial]:
        """Yield trials (pairs of texts) of these cases, at these lengths.

        Of extreme weights, only the largest that give finite scores are tried.
        """
        lengths = [t for t in lengths if self.subject.lengths.accepts(t)]
        enough, budget = False, self.subject.budget
        for case in cases if lengths else ():
            if case.size and enough:
                continue
            variant = None
            with budget.part():  # unnamed: making a copy is not a trial
                budget.require()
                variant = self._copy(case, max(lengths))
            if variant is None:
                if budget.left <= 0:
                    budget.cut(case.name, *lengths)
                continue
            enough = case.size > ENLARGED[0].size
            for time in lengths:
                yield from self.of_run(variant, time, share, first)

    def _copy(self, case: Case, time: int) -> Variant | None:
        if case.size:
            return larger(self.subject, case, time)
        try:
            variant = copy_for(self.subject, case)
        except SkipCheck:  # the model is a function, or cannot be copied
            return None
        # a model may be unable to run under autocast or in inference mode
        variant.copy.may_fail |= case.within is not nullcontext
        return variant

    def of_run(
        self,
        variant: Variant,
        time: int,
        share: float,
        first: Sequence[int] = (),
    ) -> Iterator[Trial]:
        """Yield a trial with all splits of a text, then two with one split.

        With declared visibility, positions that the proof suspects come first.
        """
        declared = self.subject.sees
        splits = self._splits(variant, time)
        if not splits:
            return
        # begin with the ends and powers of two, because time may run out
        splits.sort(key=lambda s: (s not in (1, time - 1), s & (s - 1) > 0))
        alone = 0  # number of rows in which only one token is changed
        if declared is not None and not variant.case.crowd:
            splits = [*dict.fromkeys((*first, *splits))]
            alone = min(SPLITS, len(splits))
            splits += splits[:alone]
        texts = self._pairs(time, splits)
        if declared is not None:
            texts = self._forbidden(declared, texts[0], splits, alone)
        trial = Trial(variant, *texts, splits, share=share)
        if not variant.case.losses:
            yield trial
        for row in range(0 if variant.case.crowd else min(2, len(splits))):
            yield trial.some([row])

    def _splits(self, variant: Variant, time: int) -> list[int]:
        """Return the splits of a text, or positions if visibility is declared.

        In a short text all positions are tried, because a declaration may hide
        different tokens from each of them.
        """
        declared = self.subject.sees is not None
        start = int(variant.case.shown(1, time)[0].long().argmax())
        if variant.case.crowd:
            rows = variant.rows_at_once(time) if time > 1 else 0
            if declared:
                return [row % time for row in range(rows)]
            return [1 + row % (time - 1) for row in range(rows)]
        if declared and time <= EVERY:
            return [*range(start, time)]
        splits = splits_to_try(time, self.generator, SPLITS)
        return [0] * declared + [s for s in splits if s > start]

    def _pairs(self, time: int, splits: list[int]) -> tuple[Tensor, Tensor]:
        """Draw texts, and copies of them that differ from the splits on.

        Short texts change in four ways: other tokens after the split, one
        other token, only padding, or other tokens after a start of padding.
        """
        vocab, generator = self.subject.vocab_size, self.generator
        base = draw(vocab, 1, time, generator, repeats=bool(time % 2))
        base = base.repeat(len(splits), 1)
        changed = base.clone()
        for row, split in enumerate(splits):
            mark = self.marks[row % len(self.marks)]
            kind = row % 4 if time <= SHORT else 0
            if kind == 3:
                base[row, : time // 2] = changed[row, : time // 2] = mark
            after = others(base[row, split:], vocab, generator)
            if kind == 1:
                after[1:] = base[row, split + 1 :]
            elif kind == 2 and base[row, split] != mark:
                after[:] = mark
            changed[row, split:] = after
        return base, changed

    def _forbidden(
        self,
        declared: Declared,
        base: Int[Tensor, "rows time"],
        at: list[int],
        alone: int,
    ) -> tuple[Tensor, Tensor]:
        """Return texts, and copies changed where a position must not see.

        In the last rows only one such token changes. If a position may see all
        tokens, all of them change, to show that tokens move scores.
        """
        vocab, random = self.subject.vocab_size, self.generator
        named = declared.ids(vocab)
        if takes_tokens(declared.sees):
            named = sorted({*named, *self.marks, *self.special})
        if named:  # put special ids at about half of the places
            drawn = torch.randint(len(named), base.shape, generator=random)
            where = torch.rand(base.shape, generator=random) < 1 / 2
            base = torch.where(where, torch.tensor(named)[drawn], base)
        changed = base.clone()
        for row, position in enumerate(at):
            relation = declared.of(base[row : row + 1])[0]
            hidden = (~relation[position]).nonzero().flatten()
            if not len(hidden):
                hidden = torch.arange(base.size(1))
            elif row >= len(at) - alone:
                drawn = torch.randint(len(hidden), (1,), generator=random)
                hidden = hidden[drawn]
            drawn = others(base[row], vocab, random)
            changed[row, hidden] = drawn[hidden]
        return base, changed

    def on_two_paths(self) -> Iterator[Trial]:
        """Yield, one by one, pairs of texts that take different code paths."""
        search, budget = crossings(self.subject), self.subject.budget
        while True:
            found = None
            with budget.part(share=AFTER):
                found = next(search, None)
            if found is None:
                return
            texts = found.base, found.changed, [found.split]
            yield Trial(found.variant, *texts, share=AFTER, crossing=found)

    def each_id(self) -> Iterator[Trial]:
        """Yield pairs of texts with each id after the split, or before it."""
        subject, generator = self.subject, self.generator
        vocab, time = subject.vocab_size, subject.lengths.fit(8)
        count, half = min(vocab, 1 + EACH_ID // vocab), time // 2
        if not half:
            return
        variant = copy_for(subject, EVAL if subject.is_program else DOUBLE)
        for before in (False, True):
            ids = torch.randperm(vocab, generator=generator)[:count]
            base = draw(vocab, 1, time, generator).repeat(count, 1)
            changed = base.clone()
            changed[:, half:] = ids.unsqueeze(1)
            if before:
                rest = others(base[:, half:], vocab, generator)
                changed[:, half:] = rest
                base[:, half - 1] = changed[:, half - 1] = ids
            splits = [half] * count
            name = "each id before" if before else "each id at the end"
            yield Trial(variant, base, changed, splits, name, AFTER)

    def past_buffers(self) -> Iterator[Trial]:
        """Yield trials (pairs of texts) longer than a table of masks."""
        if self.subject.limit is not None:
            return
        variant = copy_for(self.subject, DOUBLE)
        buffers: Iterable[Tensor] = getattr(variant.model, "buffers", list)()
        tables = {
            b.size(-1)
            for b in buffers
            if b.dim() > 1 and b.shape[-2] == b.shape[-1]
        }
        # the model may refuse a text longer than the user's block_size
        variant.copy.may_fail = True
        for rows in sorted(n for n in tables if SHORT < n <= LONGEST_TABLE):
            yield from self.of_run(variant, rows + 1, AFTER)
