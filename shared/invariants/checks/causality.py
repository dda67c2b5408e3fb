"""No position sees what follows it."""

from collections.abc import Iterable
from contextlib import suppress

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import ModelRaised, SkipCheck
from ..model.building import cast
from ..model.sizes import all_declared, padding_ids
from ..model.subject import Subject
from ..model.tokens import (
    SHORT,
    SPLITS,
    draw,
    lengths_to_try,
    others,
    splits_to_try,
)
from ..search.affordable import Affordable
from ..search.larger_weights import EXTREME, MODERATE, NOT_FINITE, amplified
from ..search.leaks import NotFinite, Search
from ..search.smallest_case import explain
from ..search.trial import EVAL, Mode, Trial

MASKS = {  # what they show, as shares of the length
    "a full": (0.0, 1.0),
    "a left-padded": (0.3, 1.0),
    "a right-padded": (0.0, 0.7),
}
KINDS = ("suffix", "token", "padding", "left")
DRAWS = "in train mode the shape of random draws depends on the tokens"
EACH_ID = 1 << 22  # scores of a position times ids that are tried


def _masks(training: bool = False) -> list[Mode]:
    """Return a mode for each attention mask."""
    where = "in train mode " if training else ""
    return [
        Mode(f"{where}with {name} attention mask", training, training, visible)
        for name, visible in MASKS.items()
    ]


def check_causality(subject: Subject) -> str:
    """Tokens from a split on never change an output before it.

    Why: a model that sees the token it should predict trains to a loss that
    means nothing, and generates noise.
    How: sequences that are equal up to a split go through in batches of
    equal shape; before the split the scores must be the same. In eval and
    train mode (the same dropout in both), one row alone, with and without
    gradients and masks, in several dtypes, ended in each id, and on copies
    with larger weights, in which a mask of -1e4 no longer hides a leak. What
    is found must stay when weights are nudged: see search/tolerance.py.
    Cost: some 30 short batches a mode, and 24 sequences of block_size in
    four of them.
    Reports: huggingface/transformers 48745; karpathy/nanochat 844.
    """
    return _Causality(subject).run()


class _Causality:
    """The modes, one after the other."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.generator = subject.generator()
        self.longest = subject.block_size
        self.small = self._accepted(range(2, SHORT + 1))
        self.small = self.small or subject.fit(SHORT)
        masks = len(MASKS) if subject.caller.takes_mask else 0
        # of which the first two, in eval mode, get five parts
        self.affordable = Affordable(modes=17 + 2 * masks + 3 * bool(masks))
        self.notes: list[str] = []
        self.larger: Search | None = None  # with the largest weights
        self.moved = False
        self.padding: list[int] = []  # ids that may count as padding

    def run(self) -> str:
        subject = self.subject
        if self.longest < 2:
            raise SkipCheck("one token has no future")
        search = self._search()
        marks = all_declared(search.model, ("eos_token_id", "bos_token_id"))
        ids = {0, subject.vocab_size - 1, *padding_ids(search.model)}
        ids |= {size.value for size in marks}
        self.padding = sorted(ids & {*range(subject.vocab_size)})
        long = self._accepted(lengths_to_try(search.model, self.longest))
        small, few = self.small, subject.fit(2, 3, 5, 8, SHORT)
        near = self._accepted([33])
        end = [self.longest] if self.longest > SHORT else []
        plain = search
        limited = subject.costs.limited
        if limited:
            small, near = few, []
            # a leak of short ones is confirmed at once; a model that has
            # met these may have changed
            short = self._search()
            self._sweep(short, EVAL, few, [], SPLITS, share=2)
            search.moved = short.moved
            del short  # its memory is needed
            self._sweep(search, EVAL, [], end, SPLITS, share=3)
            if search.moved:
                subject.tell(f"check_causality: so far {self.affordable}")
        else:
            # some models change themselves after a short call
            for time in reversed(long):
                self._try(search, EVAL, time, KINDS[:1], self._count(time))
            if subject.heavy:
                plain = Search(subject, subject.precise())
                plain.moved = search.moved
            kinds = ("suffix", "mixed") if subject.heavy else KINDS
            for time in small:
                self._try(plain if time in few else search, EVAL, time, kinds)
            small = few if subject.heavy else small
        trained = search if subject.spares else self._search()
        train = Mode("in train mode", training=True, grad=True)
        self.affordable.begin(subject.costs)
        # a heavy model's long ones as it is
        for time in end + (few[-1:] if limited else few):
            one = search if time in end else plain
            self._try(one, EVAL, time, KINDS[:1], alone=True)
        self.affordable.begin(subject.costs)
        for time in end + few[-1:]:
            self._try(trained, train, time, KINDS[:1], alone=True)
        self._each_id(plain)

        if not (limited or subject.heavy):
            for time in reversed([t for t in long if t not in near + end]):
                self._try(trained, train, time, KINDS[:1], 4)
        count = SPLITS // 3 if subject.heavy else SPLITS
        self._sweep(trained, train, small, near + end, count)
        self._large(small, near + end)
        self._as_run(few, end)
        if subject.caller.takes_mask:
            self._masked(few, end)
        grad = Mode("with gradients recorded", grad=True)
        self._sweep(search, grad, few, end, 4)
        quiet = Mode("in train mode without gradients", training=True)
        self._sweep(trained, quiet, few, end, 4)
        if limited:
            rest = [time for time in long if time not in end] + end
            self._sweep(search, EVAL, self.small, rest, SPLITS)
            self._sweep(trained, train, [], rest, 4)
            if not subject.costs.granted:
                raise SkipCheck("no time for any split")
        self._finish(plain)
        self._finish(search)
        self._finish(trained)
        if not self.moved:
            raise AssertionError(
                "no change of any token moves any score, so nothing can be "
                "said about the future"
            )
        tried = str(self.affordable) if limited else self._summary(long)
        return "; ".join([tried, *dict.fromkeys(self.notes)])

    def _accepted(self, lengths: Iterable[int]) -> list[int]:
        return [t for t in lengths if self.subject.lengths.accepts(t)]

    def _search(self, masked: bool = False) -> Search:
        """Return a search in a fresh model; a heavy one starts as it is."""
        subject = self.subject
        if subject.heavy:
            return Search(subject, subject.build(), own_precision=True)
        model = subject.doubled(subject.build(), masked)
        return Search(subject, model)

    def _count(self, time: int) -> int:
        """Return how many splits of a length over SHORT are tried."""
        if time == self.longest:
            return SPLITS
        heavy = self.subject.heavy
        if time in ((2 * SHORT,) if heavy else range(SHORT, 2 * SHORT + 2)):
            return time
        return 4 if heavy or 2 * time < self.longest else SPLITS // 3

    def _each_id(self, search: Search) -> None:
        """End a text in each id: one may count as padding, or as a mark."""
        vocab, time = self.subject.vocab_size, self.subject.lengths.fit(8)
        ids = torch.randperm(vocab, generator=self.generator)
        ids = ids[: 1 + EACH_ID // vocab]
        if not search.has_time(time, len(ids), 2, what="each id at the end"):
            return
        base = draw(vocab, 1, time, self.generator).repeat(len(ids), 1)
        changed = base.clone()
        changed[:, time // 2 :] = ids.unsqueeze(1)
        splits = [time // 2] * len(ids)
        self._find(search, Trial(base, changed, splits, EVAL))

    def _as_run(self, few: list[int], end: list[int]) -> None:
        """Search as the model is run: a kernel may be one dtype's alone."""
        model = self.subject.build()
        own = {p.dtype for p in getattr(model, "parameters", list)()}
        if own - {torch.float64}:
            search = Search(self.subject, model, "in its own precision")
            self._sweep(search, EVAL, few, end, 4)
        if own - {torch.bfloat16} and self.subject.builder.can_copy:
            model = cast(self.subject.build_module(""), torch.bfloat16)
            search = Search(self.subject, model, "cast to bfloat16", True)
            with suppress(ModelRaised, NotFinite):  # see check_dtype
                self._sweep(search, EVAL, few, end, 4)

    def _masked(self, few: list[int], end: list[int]) -> None:
        """Search with masks: in both modes, one row, with large weights."""
        masked = self._search(masked=True)
        for training in (False, True):
            for mode in _masks(training):
                self._sweep(masked, mode, few, end, 4)
            self.affordable.begin(self.subject.costs)
            self._try(masked, mode, few[-1], KINDS[:1], alone=True)
        self._finish(masked)
        if self.larger is not None:
            with suppress(NotFinite):
                self._sweep(self.larger, _masks()[-1], few[-1:], end, 4)

    def _large(self, small: list[int], long: list[int]) -> None:
        """Search copies with larger weights, down to one that is finite."""
        subject = self.subject
        for size in (MODERATE, *EXTREME):
            weights = f"with weights scaled up to activations of {size:.0f}"
            if size == MODERATE:
                weights = "with zeros redrawn and larger weights"
            copy = amplified(subject, size, precise=not subject.heavy)
            if copy is None:
                continue
            search = Search(subject, copy, weights, True, subject.heavy)
            try:
                self._sweep(search, EVAL, small, long, SPLITS // 3)
            except NotFinite:
                subject.less = NOT_FINITE
                continue
            self._finish(search)
            if subject.caller.takes_mask:
                self.larger = search
            if size != MODERATE:
                return

    def _finish(self, search: Search) -> None:
        self.moved |= search.moved
        if search.rows_mix:
            self.notes.append(
                "rows depend on each other: see check_batch_independence"
            )
        if search.draws_differ:
            self.notes.append(DRAWS)

    def _sweep(
        self,
        search: Search,
        mode: Mode,
        small: list[int],
        long: list[int],
        count: int,
        share: int = 1,
    ) -> None:
        self.affordable.begin(self.subject.costs, share)
        for time in reversed(long):
            self._try(search, mode, time, ("suffix",), count)
        for time in small:
            self._try(search, mode, time, ("mixed",))

    def _try(
        self,
        search: Search,
        mode: Mode,
        time: int,
        kinds: tuple[str, ...],
        count: int = SPLITS,
        alone: bool = False,
    ) -> None:
        """Try a length; alone: some splits, each a batch of one row."""
        splits = splits_to_try(time, self.generator, count)
        shown = mode.shown(time)
        splits = [s for s in splits if shown.start < s]
        if alone:
            some = sorted({0, len(splits) // 2, len(splits) - 1})
            splits = [splits[i] for i in some]
        if self.subject.costs.limited:
            choose = self.affordable.choose
            splits = choose(search, mode, time, splits, alone)
        if not splits:
            return
        rows = [self._rows(time, splits, kind) for kind in kinds]
        bases, changed = map(torch.cat, zip(*rows, strict=True))
        trial = Trial(bases, changed, splits * len(kinds), mode)
        parts = [trial]
        if alone:
            parts = [trial.rows([row]) for row in range(len(splits))]
        for part in parts:
            self._find(search, part)

    def _find(self, search: Search, trial: Trial) -> None:
        leak = search.find(trial)
        if leak is not None:
            raise explain(search, leak)

    def _rows(
        self, time: int, splits: list[int], kind: str
    ) -> tuple[Int[Tensor, "rows time"], Int[Tensor, "rows time"]]:
        """Return sequences, and the same ones changed from a split on."""
        vocab, generator = self.subject.vocab_size, self.generator
        repeats = kind != "suffix" or bool(time % 2)
        base = draw(vocab, 1, time, generator, repeats)
        base = base.repeat(len(splits), 1)
        changed = base.clone()
        for row, split in enumerate(splits):
            pad = self.padding[row % len(self.padding)]
            if kind == "left":
                base[row, : time // 2] = changed[row, : time // 2] = pad
            how = kind if kind != "mixed" else KINDS[row % len(KINDS)]
            fresh = others(base[row, split:], vocab, generator)
            if how == "token":
                changed[row, split] = fresh[0]
            elif how == "padding":
                changed[row, split:] = pad
                if (changed[row] == base[row]).all():
                    changed[row, split] = fresh[0]
            else:
                changed[row, split:] = fresh
        return base, changed

    def _summary(self, long: list[int]) -> str:
        some = "every length"
        if self.subject.lengths.step > 1:
            some = f"every multiple of {self.subject.lengths.step}"
        tried = [f"every split of {some} to {self.small[-1]}"]
        for time in long:
            generator = torch.Generator().manual_seed(0)
            count = len(splits_to_try(time, generator, self._count(time)))
            tried.append(f"{count} of {time - 1} at {time}")
        return ", ".join(tried)
