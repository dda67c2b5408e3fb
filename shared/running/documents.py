"""Documents packed in one row: how a model is told where they are."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .model.inputs import BLOCKS, FOUR_AXES, MASK, SHOWN, Input, documents
from .subject import Subject
from .ways import MASKED, Case

PROMISES = "documents", "cu_seqlens"  # kinds of arguments
PLACES = (*PROMISES, "positions", BLOCKS, FOUR_AXES)
ONES = " and an attention mask of ones"
INTEGERS = [case for case in MASKED if not case.boolean]
HIDES = " and an attention mask that hides the last document"


@dataclass(frozen=True)
class Packing(Input):
    """One way to say where documents are.

    Attributes:
        mark: the id that separates documents.
        ends: whether the mark is the last token of a document, or the first.
        beside: masks that can be given with the arguments.
    """

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

        def values(tokens: Tensor, _: list[int]) -> dict[str, Any]:
            sizes = lengths(tokens.size(1))
            given = self.values(tokens, sizes)
            if beside:
                given[MASK] = torch.ones_like(tokens)
            if beside == HIDES:
                given[MASK][:, -sizes[-1] :] = 0
            return given

        how = "in train mode " * training + f"with {self.words}{beside}"
        given = replace(self, values=values)
        return Case(how, training, training, given=given, own=self.own)

    def gives(self, name: str, tokens: Int[Tensor, "rows time"]) -> bool:
        """Whether an argument is among those that it gives."""
        with suppress(Exception):  # the user's function: a call shows it
            return name in self.make(tokens)
        return False

    def text(
        self, lengths: list[int], tokens: Int[Tensor, "rows time"]
    ) -> Int[Tensor, "rows time"]:
        """Return tokens of one document with the mark between several."""
        if self.mark is None:
            return tokens
        ends = torch.tensor(lengths).cumsum(0)[:-1] - int(self.ends)
        return tokens.index_fill(1, ends, self.mark)

    def without_cache(self, subject: Subject) -> "Packing | None":
        """Return this packing with use_cache=False, if the call takes that."""
        caller = subject.caller
        if "use_cache" not in (*caller.arguments, *caller.own_arguments):
            return None
        return replace(
            self,
            words=f"{self.words} with use_cache=False",
            values=lambda *of: self.values(*of) | {"use_cache": False},
        )


def split(time: int) -> list[int]:
    """Return lengths of documents in a row of a proof."""
    first = [7, 1, 2] if time > 10 else [1, 2] if time > 3 else [1]
    return [*first, time - sum(first)] if time > 1 else [time]


def promised(subject: Subject) -> bool:
    """Whether documents must be apart: declared, or an argument's purpose."""
    kinds = {given.kind for given in subject.caller.inputs}
    return subject.documents is not None or bool(kinds & {*PROMISES})


def packings(subject: Subject) -> list[Packing]:
    """Return how documents can be given: alternatives, if it is promised.

    A packing that gives an attention mask gets no second one.
    """
    ways, tokens = _ways(subject), subject.draw(1, 5)
    return [
        replace(way, beside=("",)) if way.gives(MASK, tokens) else way
        for way in ways
    ]


def _ways(subject: Subject) -> list[Packing]:
    said, inputs = subject.documents, subject.caller.inputs
    shares = {ONES: SHOWN["a full"], HIDES: SHOWN["a right-padded"]}
    refused = [c.visible for c in subject.unanswered if c in INTEGERS]
    if not subject.caller.takes_mask:
        shares = {}
    beside = ("", *(w for w, at in shares.items() if at not in refused))
    if isinstance(said, int):
        way = Packing("", "documents", "", lambda *_: {}, mark=said)
        way, words = replace(way, beside=beside), f"id {said} at the"
        start = replace(way, words=f"{words} start of each")
        return [replace(start, words=f"{words} end of each", ends=True), start]
    if callable(said):
        name = f"{getattr(said, '__name__', 'documents')}()"
        return [
            Packing(
                name="",
                kind="documents",
                words=name,
                values=lambda _, lengths: dict(said(lengths)),
                single=True,
                beside=beside,
            )
        ]
    places = [i for i in inputs if i.kind == "positions"][:1]
    given = [i for i in inputs if i.kind in PROMISES]
    if said is not None:
        known = [i for i in inputs if i.name == said and i.kind in PLACES]
        given = known[:1] or [
            Input(said, "documents", said, lambda *of: {said: documents(*of)})
        ]
    if any(i.kind == "documents" for i in given):
        return [_together(given + places, beside, first) for first in (0, 1)]
    if given:
        return [_together(given + places, beside)]
    masks = [[i] for i in inputs if i.kind in (BLOCKS, FOUR_AXES)]
    ways = [mask + places for mask in [[], *masks]]
    return [_together(way, beside) for way in ways if way]


def _together(
    given: list[Input], beside: tuple[str, ...], first: int = 0
) -> Packing:
    """Return the packing by all of these; documents are counted from first."""
    given = [*{i.name: i for i in given}.values()]

    def values(tokens: Tensor, lengths: list[int]) -> dict[str, Any]:
        return {
            name: value + first if i.kind == "documents" else value
            for i in given
            for name, value in i.values(tokens, lengths).items()
        }

    words = " and ".join(i.words for i in given) + " counted from 1" * first
    return Packing(
        *("", "documents", words, values),
        single=any(i.single for i in given),
        own=any(i.own for i in given),
        beside=beside,
    )
