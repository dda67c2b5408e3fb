"""Documents packed in one row: how a model is told where they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .cases import Case
from .model.inputs import (
    BLOCKS,
    FOUR_AXES,
    MASK,
    Input,
    blocks,
    halves,
    named,
)
from .subject import Subject

PROMISES = "segments", "documents", "cu_seqlens"  # kinds of arguments
ONES = " and an attention mask of ones"
HIDES = " and an attention mask that hides the last document"
BESIDE = ["", ONES, HIDES]  # masks that are given with the documents


@dataclass(frozen=True)
class Packing:
    """One way to say where documents are.

    Attributes:
        words: of a message.
        make: returns the arguments, from lengths and tokens.
        promised: whether the documents must be apart.
        single: whether a call takes one row.
        own: whether the model's own call takes the arguments.
        mark: the id that separates documents.
        ends: whether the mark is the last token of a document, or the first.
        masks: whether a mask is among the arguments.
        more: arguments that are the same for all texts.
    """

    words: str
    make: Callable[[list[int], Tensor], dict[str, Any]]
    promised: bool = True
    single: bool = False
    own: bool = False
    mark: int | None = None
    ends: bool = False
    masks: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def case(
        self,
        lengths: Callable[[int], list[int]],
        training: bool = False,
        beside: str = "",
    ) -> Case:
        """Return the case of rows whose documents have some lengths."""

        def make(tokens: Tensor) -> dict[str, Any]:
            sizes = lengths(tokens.size(1))
            given = self.make(sizes, tokens) | dict(self.more)
            if beside:
                given[MASK] = torch.ones_like(tokens)
            if beside == HIDES:
                given[MASK][:, -sizes[-1] :] = 0
            return given

        how = f"with {self.words}{beside}"
        given = Input(how, "documents", self.words, make, single=self.single)
        where = "in train mode " * training + how
        return Case(where, training, training, given=given, own=self.own)

    def text(
        self, lengths: list[int], tokens: Int[Tensor, "rows time"]
    ) -> Int[Tensor, "rows time"]:
        """Return tokens with the mark between documents, and nowhere else."""
        if self.mark is None:
            return tokens
        text = torch.where(tokens == self.mark, self.mark - 1, tokens)
        text = torch.where(text < 0, 1, text)
        ends = torch.tensor(lengths).cumsum(0)[:-1]
        text[:, ends - int(self.ends)] = self.mark
        return text


def split(time: int) -> list[int]:
    """Return lengths of documents in a row of a proof."""
    first = [7, 1, 2] if time > 10 else [1, 2] if time > 3 else [1]
    return [*first, time - sum(first)] if time > 1 else [time]


def packings(subject: Subject) -> list[Packing]:
    """Return how documents can be given: alternatives, if it is promised."""
    said, caller = subject.documents, subject.caller
    if isinstance(said, int):
        make: Any = lambda lengths, tokens: {}  # noqa: E731
        words = [f"id {said} at the {end} of each" for end in ("end", "start")]
        return [
            Packing(words[not ends], make, mark=said, ends=ends)
            for ends in (True, False)
        ]
    if callable(said):
        theirs = lambda lengths, tokens: dict(said(lengths))  # noqa: E731
        name = getattr(said, "__name__", "documents")
        return [Packing(f"{name}()", theirs, single=True)]
    places = [i for i in caller.inputs if i.kind == "positions"][:1]
    masks = [i for i in caller.inputs if i.kind in (BLOCKS, FOUR_AXES)]
    if said is not None:
        given = [i for i in caller.inputs if i.name == said][:1]
        make = partial(named, (said,), halves)
        given = given or [Input(said, "documents", said, make)]
        return _numbered(given if given == places else [*given, *places])
    given = [i for i in caller.inputs if i.kind in PROMISES]
    if given:
        return _numbered([*given, *places])
    ways = [places, *([mask, *places] for mask in masks)]
    return [replace(_numbered(w)[0], promised=False) for w in ways if w]


def _numbered(given: list[Input]) -> list[Packing]:
    """Return packings whose documents are counted from 0, and from 1."""
    given = list({i.name: i for i in given}.values())
    words = " and ".join(i.name for i in given)
    masks = any(i.kind == FOUR_AXES for i in given)
    if masks:
        words = " and ".join(i.words for i in given)
    counted = any(i.kind in PROMISES[:2] for i in given)
    return [
        Packing(
            words + " counted from 1" * first,
            partial(_packed, given, first),
            single=any(i.single for i in given),
            own=any(i.own for i in given),
            masks=masks,
        )
        for first in range(1 + counted)
    ]


def _packed(
    given: list[Input], first: int, lengths: list[int], tokens: Tensor
) -> dict[str, Any]:
    """Return arguments, each in the form that the model answers."""
    rows, device = len(tokens), tokens.device
    at = torch.cat([torch.arange(n, device=device) for n in lengths])
    ids = (at == 0).cumsum(0) - 1
    ends = torch.tensor(lengths * rows, device=device).cumsum(0)
    values = {
        "positions": at.expand(rows, -1).clone(),
        "cu_seqlens": torch.cat([ends.new_zeros(1), ends]),
        FOUR_AXES: (ids == ids.unsqueeze(1))
        .tril()
        .expand(rows, 1, -1, -1)
        .clone(),
    }
    made: dict[str, Any] = {}
    for each in given:
        if each.kind == BLOCKS:
            made[each.name] = blocks(ids)
            continue
        value = values.get(each.kind, (ids + first).expand(rows, -1).clone())
        for name, sample in each.make(tokens).items():
            if not isinstance(sample, Tensor):
                made[name] = max(lengths)
                continue
            one = sample.dim() == 1 < value.dim()
            made[name] = (value[0] if one else value).to(sample.dtype)
    return made
