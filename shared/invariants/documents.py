"""Documents packed in one row: how a model is told where they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .cases import Case
from .model.inputs import BLOCKS, FOUR_AXES, MASK, Input, blocks, halves
from .subject import Subject

COUNTED = "segments", "documents"  # kinds of arguments: ids of documents
PROMISES = *COUNTED, "cu_seqlens"
ONES = " and an attention mask of ones"
HIDES = " and an attention mask that hides the last document"


@dataclass(frozen=True)
class Packing:
    """One way to say where documents are.

    Attributes:
        words: of a message.
        make: returns the arguments, from lengths and tokens.
        single: whether a call takes one row.
        own: whether the model's own call takes the arguments.
        mark: the id that separates documents.
        ends: whether the mark is the last token of a document, or the first.
        beside: masks that can be given with the arguments.
    """

    words: str
    make: Callable[[list[int], Tensor], dict[str, Any]]
    single: bool = False
    own: bool = False
    mark: int | None = None
    ends: bool = False
    beside: tuple[str, ...] = ("",)

    def case(
        self,
        lengths: Callable[[int], list[int]],
        training: bool = False,
        beside: str = "",
    ) -> Case:
        """Return the case of rows whose documents have some lengths."""

        def make(tokens: Tensor) -> dict[str, Any]:
            sizes = lengths(tokens.size(1))
            given = self.make(sizes, tokens)
            if beside:
                given[MASK] = torch.ones_like(tokens)
            if beside == HIDES:
                given[MASK][:, -sizes[-1] :] = 0
            return given

        how = f"with {self.words}{beside}"
        given = Input(
            how,
            "documents",
            self.words,
            make,
            single=self.single,
            own=self.own,
        )
        where = "in train mode " * training + how
        return Case(where, training, training, given=given, own=self.own)

    def text(
        self, lengths: list[int], tokens: Int[Tensor, "rows time"]
    ) -> Int[Tensor, "rows time"]:
        """Return tokens of one document with the mark between several."""
        if self.mark is None:
            return tokens
        ends = torch.tensor(lengths).cumsum(0)[:-1] - int(self.ends)
        return tokens.index_fill(1, ends, self.mark)

    def without_cache(self, subject: Subject) -> "list[Packing]":
        """Return this packing with use_cache=False, if the call takes that."""
        caller, make = subject.caller, self.make
        if "use_cache" not in {*caller.arguments, *caller.own_arguments}:
            return []
        words, no = f"{self.words} with use_cache=False", {"use_cache": False}
        more = lambda lengths, tokens: make(lengths, tokens) | no  # noqa: E731
        return [replace(self, words=words, make=more)]


def split(time: int) -> list[int]:
    """Return lengths of documents in a row of a proof."""
    first = [7, 1, 2] if time > 10 else [1, 2] if time > 3 else [1]
    return [*first, time - sum(first)] if time > 1 else [time]


def promised(subject: Subject) -> bool:
    """Whether documents must be apart: declared, or an argument's purpose."""
    kinds = {given.kind for given in subject.caller.inputs}
    return subject.documents is not None or bool(kinds & {*PROMISES})


def packings(subject: Subject) -> list[Packing]:
    """Return how documents can be given: alternatives, if it is promised."""
    said, caller = subject.documents, subject.caller
    beside = ("", ONES, HIDES) if caller.takes_mask else ("",)
    if isinstance(said, int):
        way = Packing("", lambda lengths, tokens: {}, mark=said, beside=beside)
        start = f"id {said} at the start of each"
        end = f"id {said} at the end of each"
        return [replace(way, words=end, ends=True), replace(way, words=start)]
    if callable(said):
        name = f"{getattr(said, '__name__', 'documents')}()"
        make = lambda lengths, tokens: dict(said(lengths))  # noqa: E731
        return [Packing(name, make, single=True, beside=beside)]
    places = [i for i in caller.inputs if i.kind == "positions"][:1]
    masks = [i for i in caller.inputs if i.kind in (BLOCKS, FOUR_AXES)]
    given = [i for i in caller.inputs if i.kind in PROMISES]
    if said is not None:
        own = Input(said, "documents", said, lambda ids: {said: halves(ids)})
        given = [i for i in caller.inputs if i.name == said][:1] or [own]
    if given:
        return _counted([*given, *places], beside)
    ways = [places, *([mask, *places] for mask in masks)]
    return [_counted(way, beside)[0] for way in ways if way]


def _counted(given: list[Input], beside: tuple[str, ...]) -> list[Packing]:
    """Return packings whose documents are counted from 0, and from 1."""
    given = list({i.name: i for i in given}.values())
    kinds = {i.kind for i in given}
    way = Packing(
        " and ".join(i.words for i in given),
        partial(_packed, given, 0),
        any(i.single for i in given),
        any(i.own for i in given),
        beside=("",) if FOUR_AXES in kinds else beside,
    )
    if not kinds & {*COUNTED}:
        return [way]
    words, make = f"{way.words} counted from 1", partial(_packed, given, 1)
    return [way, replace(way, words=words, make=make)]


def _packed(
    given: list[Input], first: int, lengths: list[int], tokens: Tensor
) -> dict[str, Any]:
    """Return arguments, each in the form that the model answers."""
    rows, device = len(tokens), tokens.device
    at = torch.cat([torch.arange(n, device=device) for n in lengths])
    ids = (at == 0).cumsum(0) - 1
    ends = torch.tensor([0, *lengths * rows], device=device).cumsum(0)
    seen = (ids == ids.unsqueeze(1)).tril()
    values = {
        "positions": at.expand(rows, -1),
        "cu_seqlens": ends,
        FOUR_AXES: seen.expand(rows, 1, -1, -1),
    }
    made: dict[str, Any] = {}
    for each in given:
        if each.kind == BLOCKS:
            made[each.name] = blocks(tuple(lengths), device)
            continue
        value = values.get(each.kind, (ids + first).expand(rows, -1))
        for name, sample in each.make(tokens).items():
            if isinstance(sample, Tensor):
                one = sample.dim() == 1 < value.dim()
                kept = value[0] if one else value
                made[name] = kept.to(sample.dtype, copy=True).contiguous()
            else:
                made[name] = max(lengths)
    return made
