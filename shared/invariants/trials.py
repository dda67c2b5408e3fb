"""Draws the pairs of texts of check_causality."""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from .leaks import Trial
from .model.sizes import all_declared, padding_ids
from .subject import Subject
from .tokens import SHORT, draw, others, splits_to_try
from .ways import Way

KINDS = ("suffix", "token", "padding", "left")
MIXED = ("mixed",)  # a split of each kind in turn
SUFFIX = ("suffix",)
EACH_ID = 1 << 22  # scores of a position times ids that are tried


class Texts:
    """Draws texts, and the same ones changed from a split on."""

    def __init__(self, subject: Subject, generator: torch.Generator):
        self.subject, self.generator = subject, generator
        self.padding: list[int] = []  # ids that may count as padding

    def look_at(self, model: object) -> None:
        """Find ids that may count as padding, or as a mark."""
        marks = all_declared(model, ("eos_token_id", "bos_token_id"))
        ids = {0, self.subject.vocab_size - 1, *padding_ids(model)}
        ids |= {size.value for size in marks}
        self.padding = sorted(ids & {*range(self.subject.vocab_size)})

    def lengths(self, edges: list[int]) -> list[int]:
        """Return lengths between the edges: other seeds draw others."""
        room = range(SHORT + 1, self.subject.block_size)
        if len(room) < 4:
            return []
        at = torch.randint(len(room), (4,), generator=self.generator)
        return sorted({room[i] for i in at.tolist()} - {*edges})

    def splits(self, way: Way, time: int, count: int) -> tuple[int, ...]:
        """Return splits behind what a mask hides."""
        splits = splits_to_try(time, self.generator, count)
        return tuple(s for s in splits if way.shown(time).start < s)

    @property
    def ids_tried(self) -> int:
        """How many ids of the vocabulary are put into a text each."""
        vocab = self.subject.vocab_size
        return min(vocab, 1 + EACH_ID // vocab)

    def each_id(
        self, time: int, start: bool, splits: list[int]
    ) -> Iterator[Trial]:
        """Yield texts with an id in the middle, changed from there on."""
        vocab, half = self.subject.vocab_size, time // 2
        ids = torch.randperm(vocab, generator=self.generator)
        ids = ids[: self.ids_tried]
        base = draw(vocab, 1, time, self.generator).repeat(len(ids), 1)
        changed = base.clone()
        changed[:, half:] = ids.unsqueeze(1)
        if start:
            rest = others(base[:, half:], vocab, self.generator)
            changed[:, half:] = rest
            base[:, half - 1] = changed[:, half - 1] = ids
        yield Trial(base, changed, [half] * len(ids))

    def trials(
        self,
        time: int,
        kinds: tuple[str, ...],
        splits: list[int],
        alone: bool = False,
    ) -> Iterator[Trial]:
        """Yield pairs of texts: of all splits in one, or each alone."""
        rows = [self._pair(time, splits, kind) for kind in kinds]
        bases, changed = map(torch.cat, zip(*rows, strict=True))
        trial = Trial(bases, changed, splits * len(kinds))
        if not alone:
            yield trial
            return
        for row in range(len(splits)):
            yield trial.rows([row])

    def _pair(
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
            after = others(base[row, split:], vocab, generator)
            if how == "token":
                changed[row, split] = after[0]
            elif how == "padding":
                changed[row, split:] = pad
                if (changed[row] == base[row]).all():
                    changed[row, split] = after[0]
            else:
                changed[row, split:] = after
        return base, changed
