"""The rounds of check_causality; the ones that find most come first."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .budget import Budget
from .copies import fresh, frozen, in_dtype, own
from .costs import SHARE, Round
from .dependence.cases import Case
from .larger_weights import EXTREME, MODERATE, larger
from .subject import Subject
from .tokens import SHORT, SPLITS, lengths_to_try
from .trials import KINDS, MIXED, SUFFIX, Texts
from .variant import Variant
from .ways import (
    AUTOCAST,
    CAUSALITY,
    CROWD,
    EVAL,
    INFERENCE,
    LOSSES,
    MASKED,
    TRAIN,
    TRAIN_AUTOCAST,
    TRAIN_WITHOUT_GRADIENTS,
    WITH_GRADIENTS,
    Way,
    ways_of,
)

FEW = SPLITS // 3
LONGEST_TABLE = 4096  # rows of a table of masks, past which texts are tried
MIDDLE = (24, 100)  # lengths of texts as people have them
DRAWN = Way("at lengths drawn from the seed")


class LeakRounds:
    """Goes through the ways, lengths and splits; draws the texts."""

    def __init__(
        self,
        subject: Subject,
        budget: Budget,
        first: tuple[Case, int] | None = None,
    ):
        self.subject, self.budget = subject, budget
        self.first = first  # the case that a proof leaves open
        self.generator = subject.generator()
        self.longest = subject.block_size
        self.small = self._accepted(range(2, SHORT + 1))
        self.small = self.small or subject.fit(SHORT)
        self.texts = Texts(subject, self.generator)
        self.largest = MODERATE  # activations in which scores are finite

    def __iter__(self) -> Iterator[Round]:
        """Yield the rounds; no copy is held that is not needed any more."""
        subject, budget = self.subject, self.budget
        few, longest = subject.fit(2, 3, 5, 8, SHORT), self.longest
        end = [longest] if longest > SHORT else []
        # some models change themselves after a short call: another copy
        short = fresh(subject, budget)
        self.texts.look_at(short.model)
        if self.first is not None:
            yield from self._where_it_is_open(*self.first)
        yield from self._rounds(short, few, share=1 / 4)
        del short
        variant = fresh(subject, budget)
        long = self._accepted(lengths_to_try(variant.model, longest))
        near = [t for t in long if t == 33 and t not in end]
        yield from self._rounds(variant, end, share=1 / 4)
        yield from self._alone(variant, end + few)
        yield from self._each_id(variant)
        trained = fresh(subject, budget).run_as(TRAIN)
        yield from self._alone(trained, end + few[-1:])
        yield from self._rounds(trained, end + few, share=1 / 6)
        yield from self._with_larger_weights(few, near + end)
        yield from self._as_run(few + end)
        yield from self._otherwise(few + end)
        for way in (WITH_GRADIENTS, TRAIN_WITHOUT_GRADIENTS):
            yield from self._rounds(variant.run_as(way), few + end, 4)
        variant = fresh(subject, budget)
        drawn = self._accepted(self.texts.lengths(long))
        yield from self._rounds(variant.run_as(DRAWN), drawn, FEW)
        yield from self._past_buffers()
        yield from self._crowd(variant)
        for time in reversed(long):
            count = self._count(time)
            yield from self._rounds(variant, [time], count, share=1)
        yield from self._rounds(trained, reversed(long), 4, share=1)
        yield from self._rounds(variant, self.small, kinds=KINDS, share=1)
        yield from self._rounds(trained, self.small + near, share=1)

    def of_the_rules(self) -> Iterator[Round]:
        """Yield a few rounds: a test of the rules of a proof."""
        subject, budget = self.subject, self.budget
        few = subject.fit(3, SHORT)
        variant = fresh(subject, budget)
        self.texts.look_at(variant.model)
        if not subject.heavy and self.longest > SHORT:
            few.append(self.longest)
        yield from self._rounds(variant, few, FEW)
        trained = few[:1] if subject.heavy else few
        yield from self._rounds(variant.run_as(TRAIN), trained, FEW)
        for size in EXTREME if not subject.heavy else ():
            enlarged = larger(subject, budget, size, max(few))
            if enlarged is not None:
                yield from self._rounds(enlarged, few, FEW)
                break
        # no proof is made of these
        if LOSSES in ways_of(CAUSALITY, subject):
            lengths = subject.fit(2, 8)
            yield from self._alone(variant.run_as(LOSSES), lengths)
        yield from self._past_buffers()
        yield from self._crowd(variant, share=1 / 40)

    def _where_it_is_open(self, case: Case, time: int) -> Iterator[Round]:
        """Yield rounds of what a proof leaves open; most leaks show there."""
        subject, budget, way = self.subject, self.budget, case.way
        if case.dtype is not None:
            variant = in_dtype(subject, budget, case.dtype).run_as(way)
        elif case.frozen:
            variant = frozen(subject, budget).run_as(way)
        else:
            masked = way.visible is not None
            variant = fresh(subject, budget, masked).run_as(way)
        if way.crowd:
            yield from self._crowd(variant)
            return
        if not way.losses:
            yield from self._rounds(variant, [time], share=1 / 2)
        yield from self._alone(variant, [time])
        if case.dtype is None and not case.frozen and not way.losses:
            for enlarged in self._enlarged(time):
                yield from self._rounds(enlarged.run_as(way), [time], FEW)

    def _accepted(self, lengths: Iterable[int]) -> list[int]:
        return [t for t in lengths if self.subject.lengths.accepts(t)]

    def _count(self, time: int) -> int:
        """Return how many splits of a length over SHORT are tried."""
        if time == self.longest:
            return SPLITS
        if time in range(SHORT, 2 * SHORT + 2):
            return time
        return 4 if 2 * time < self.longest else FEW

    def _rounds(
        self,
        variant: Variant,
        lengths: Iterable[int],
        count: int = SPLITS,
        kinds: tuple[str, ...] = MIXED,
        share: float = SHARE,
    ) -> Iterator[Round]:
        """Yield a round for each length; of long ones suffixes change."""
        for time in lengths:
            splits = self.texts.splits(variant.way, time, count)
            changes = SUFFIX if time > SHORT else kinds
            trials = partial(self.texts.trials, time, changes)
            yield Round(variant, time, splits, share=share, trials=trials)

    def _alone(
        self, variant: Variant, lengths: Iterable[int]
    ) -> Iterator[Round]:
        """Yield rounds of a few splits, each a batch of one row."""
        for time in lengths:
            splits = self.texts.splits(variant.way, time, SPLITS)
            some = sorted({0, len(splits) // 2, len(splits) - 1})
            splits = tuple(splits[i] for i in some if splits)
            trials = partial(self.texts.trials, time, SUFFIX, alone=True)
            name = "a row alone"
            yield Round(variant, time, splits, 1, name=name, trials=trials)

    def _each_id(self, variant: Variant) -> Iterator[Round]:
        """Put each id into a text: one may count as padding, or as a mark.

        At the end of the changed text, then near the start of both.
        """
        time, texts = self.subject.lengths.fit(8), self.texts
        rows = min(texts.ids_tried, variant.rows_at_once(time))
        calls = -(-texts.ids_tried // rows)
        for name, start in ((" at the end", False), (" before", True)):
            yield Round(
                variant,
                time,
                rows=rows,
                calls=(1 + start) * calls + 1,
                name="each id" + name,
                trials=partial(texts.each_id, time, start),
            )

    def _past_buffers(self) -> Iterator[Round]:
        """Yield rounds of texts longer than a table of masks has rows."""
        if self.subject.limit is not None:
            return
        variant = fresh(self.subject, self.budget)
        buffers: Iterable[Tensor] = getattr(variant.model, "buffers", list)()
        tables = {
            b.size(-1) for b in buffers if b.shape[-2:-1] == b.shape[-1:]
        }
        # longer than the given block_size: the model may refuse such a text
        variant.copy.may_fail = True
        lengths = sorted(n + 1 for n in tables if SHORT < n <= LONGEST_TABLE)
        yield from self._rounds(variant, lengths, 4)

    def _crowd(self, one: Variant, share: float = SHARE) -> Iterator[Round]:
        """Yield a round with many rows in one call."""
        crowded, time = one.run_as(CROWD), self.subject.lengths.fit(128)
        rows = crowded.rows_at_once(time)
        splits = [1 + row % (time - 1) for row in range(rows)]
        trials = partial(self.texts.trials, time, SUFFIX, splits)
        if time > 1 and self.subject.rows is None:
            yield Round(
                crowded,
                time,
                rows=rows,
                calls=2,
                share=share,
                trials=lambda none: trials(),
            )

    def _with_larger_weights(
        self, few: list[int], long: list[int]
    ) -> Iterator[Round]:
        """Yield rounds of copies with larger weights."""
        for variant in self._enlarged(max(few + long)):
            yield from self._rounds(variant, [*few, *reversed(long)], FEW)
            rest = [time for time in self.small if time not in few]
            yield from self._rounds(variant, rest, share=1 / 100)

    def _enlarged(self, longest: int) -> Iterator[Variant]:
        """Yield copies with larger weights.

        The largest are stepped down until the scores are finite.
        """
        for size in (MODERATE, *EXTREME):
            variant = larger(self.subject, self.budget, size, longest)
            if variant is None:
                continue
            yield variant
            if size != MODERATE:
                self.largest = size
                return

    def _as_run(self, lengths: list[int]) -> Iterator[Round]:
        """Yield rounds of the model as it is run: a kernel may be one dtype's.

        In its own precision, with weights that are not trained, and cast, in
        eval and train mode; by inference mode and autocast.
        """
        subject, budget = self.subject, self.budget
        lengths = sorted({*lengths[1::2], lengths[-1], *subject.fit(*MIDDLE)})
        variant = own(subject, budget)
        model = variant.model
        dtypes = {p.dtype for p in getattr(model, "parameters", list)()}
        variant.copy.weights = "in its own precision"
        for way in (EVAL, TRAIN) if dtypes - {torch.float64} else ():
            yield from self._rounds(variant.run_as(way), lengths, 4)
        # a model need not run so: index_add_ of two dtypes, say
        able = replace(variant, copy=replace(variant.copy, may_fail=True))
        for way in (INFERENCE, AUTOCAST, TRAIN_AUTOCAST):
            yield from self._rounds(able.run_as(way), lengths, 4)
        if not (subject.is_module and subject.builder.can_copy):
            return
        yield from self._rounds(frozen(self.subject, self.budget), lengths, 4)
        for dtype in (torch.bfloat16, torch.float16):
            if dtypes - {dtype}:
                one = in_dtype(subject, budget, dtype)
                yield from self._rounds(one, lengths, 4)
                yield from self._rounds(one.run_as(TRAIN), lengths, 4)

    def _otherwise(self, lengths: list[int]) -> Iterator[Round]:
        """Yield rounds of all other ways: masks, targets, its own call."""
        subject, budget = self.subject, self.budget
        done = {EVAL, TRAIN, WITH_GRADIENTS, TRAIN_WITHOUT_GRADIENTS, CROWD}
        done |= {INFERENCE, AUTOCAST, TRAIN_AUTOCAST}
        ways = [w for w in ways_of(CAUSALITY, subject) if w not in done]
        variants = {m: fresh(subject, budget, masked=m) for m in (True, False)}
        others = [variants[w.visible is not None].run_as(w) for w in ways]
        for one in others:
            if one.way is LOSSES:
                yield from self._alone(one, subject.fit(2, 8))
            else:
                yield from self._rounds(one, lengths[-2:], 4)
                yield from self._alone(one, subject.fit(SHORT))
        if subject.caller.takes_mask:
            enlarged = larger(subject, budget, self.largest, lengths[-1])
            if enlarged is not None:
                one = enlarged.run_as(MASKED[2])
                yield from self._rounds(one, lengths[-2:], 4)
        for one in others:
            if one.way.visible is not None and not one.way.boolean:
                yield from self._rounds(one, lengths[:-2], 4, share=1 / 30)
