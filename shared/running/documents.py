"""Documents packed in one row: how a model is told where they are."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from random import Random
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .model.inputs import (
    BLOCKS,
    FOUR_AXES,
    MASK,
    SHOWN,
    Input,
    Layout,
    documents,
)
from .subject import Subject
from .ways import MASKED, Case

PROMISES = "documents", "cu_seqlens"  # kinds of arguments
PLACES = (*PROMISES, "positions", BLOCKS, FOUR_AXES)
INTEGERS = [case for case in MASKED if not case.boolean]


class Beside(Enum):
    """The attention mask that is given with documents, in words."""

    NOTHING = ""
    ONES = " and an attention mask of ones"
    HIDES = " and an attention mask that hides the last document"


class Numbering(Enum):
    """Numbers of documents other than 0, 1, 2, ..., in words."""

    LARGE = "large ids with gaps"
    IN_TURNS = "two ids in turns"


@dataclass(frozen=True)
class Packing(Input):
    """One way to say where documents are.

    Attributes:
        mark: the id that separates documents.
        ends: whether the mark is the last token of a document, or the first.
        beside: masks that can be given with the arguments.
        ids: the argument that numbers the documents; "": none does.
    """

    mark: int | None = None
    ends: bool = False
    beside: tuple[Beside, ...] = (Beside.NOTHING,)
    ids: str = ""

    def case(
        self,
        lengths: Callable[[int, int], Sequence[int]],
        training: bool = False,
        beside: Beside = Beside.NOTHING,
    ) -> Case:
        """Return the case of rows whose documents have some lengths.

        Args:
            lengths: of the documents, from those of a row and its place.
            training: whether it is in train mode.
            beside: the mask that is given with the arguments.
        """

        def values(tokens: Tensor, layout: Layout) -> dict[str, Any]:
            time = tokens.size(1)
            sizes = tuple((*lengths(time, at),) for at in layout.places)
            given = self.values(tokens, replace(layout, lengths=sizes))
            if beside is not Beside.NOTHING:
                given[MASK] = torch.ones_like(tokens)
            hiding = sizes if beside is Beside.HIDES else ()
            for row, each in enumerate(hiding):
                given[MASK][row, -each[-1] :] = 0
            return given

        how = "in train mode " * training + f"with {self.words}"
        how += beside.value
        given = replace(self, values=values)
        return Case(how, training, training, given=given, own=self.own)

    def gives(self, name: str, tokens: Int[Tensor, "rows time"]) -> bool:
        """Whether an argument is among those that it gives."""
        with suppress(Exception):  # the user's function: a call shows it
            return name in self.make(tokens)
        return False

    def numbered(self, numbering: Numbering) -> "Packing":
        """Return the same with other numbers of documents."""
        name, number = self.ids, NUMBERS[numbering]

        def values(tokens: Tensor, layout: Layout) -> dict[str, Any]:
            made = self.values(tokens, layout)
            return made | {name: number(made[name])}

        words = f"{self.words} ({numbering.value})"
        return replace(self, words=words, values=values)

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


# Numbers of documents, from those counted in a row: some that 16 bits, or 8,
# cannot tell from each other, with gaps between, and two in turns.
LARGE = 0, 256, 257, 300, 2048, 2049, 2060, 2061
NUMBERS: dict[Numbering, Callable[[Tensor], Tensor]] = {
    Numbering.LARGE: lambda ids: (
        ids.div(8, rounding_mode="floor") * 2062
        + torch.tensor(LARGE, device=ids.device, dtype=ids.dtype)[ids % 8]
    ),
    Numbering.IN_TURNS: lambda ids: 1 + ids % 2,
}
UNLIKE = 4  # rows of a proof, whose documents stand in other places


def split(time: int, place: int = 0) -> list[int]:
    """Return lengths of documents in a row of a proof.

    The first row has few, the second as many as tokens, the third some whose
    boundaries are drawn, the fourth two that part in a later chunk.
    """
    if place % UNLIKE == 1:
        return [1] * time
    if place % UNLIKE == 2:
        return drawn(time, max(time // 5, 1))
    if place % UNLIKE == 3 and time > 3:
        return [time - time // 4, time // 4]
    first = [7, 1, 2] if time > 10 else [1, 2] if time > 3 else [1]
    return [*first, time - sum(first)] if time > 1 else [time]


def drawn(time: int, count: int) -> list[int]:
    """Return lengths of at most so many documents, with drawn boundaries."""
    # not torch's: a proof follows what is drawn there
    few = min(count, time) - 1
    ends = [0, *sorted(Random(time).sample(range(1, time), few)), time]
    return [end - start for start, end in pairwise(ends)]


def promised(subject: Subject) -> bool:
    """Whether documents must be apart: declared, or an argument's purpose."""
    kinds = {given.kind for given in subject.caller.inputs}
    return subject.documents is not None or bool(kinds & {*PROMISES})


def packings(subject: Subject) -> list[Packing]:
    """Return how documents can be given: alternatives, if it is promised.

    A packing that gives an attention mask gets no second one.
    """
    ways, tokens = _ways(subject), subject.draw(1, 5)
    nothing = (Beside.NOTHING,)
    return [
        replace(way, beside=nothing) if way.gives(MASK, tokens) else way
        for way in ways
    ]


def _ways(subject: Subject) -> list[Packing]:
    said, inputs = subject.documents, subject.caller.inputs
    shares = {
        Beside.ONES: SHOWN["a full"],
        Beside.HIDES: SHOWN["a right-padded"],
    }
    refused = [c.visible for c in subject.unanswered if c in INTEGERS]
    if not subject.caller.takes_mask:
        shares = {}
    given_too = [w for w, at in shares.items() if at not in refused]
    beside = (Beside.NOTHING, *given_too)
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
                values=lambda _, layout: dict(said([*layout.lengths[0]])),
                single=True,
                packed=True,
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
    given: list[Input], beside: tuple[Beside, ...], first: int = 0
) -> Packing:
    """Return the packing by all of these; documents are counted from first."""
    given = [*{i.name: i for i in given}.values()]

    def values(tokens: Tensor, layout: Layout) -> dict[str, Any]:
        return {
            name: value + first if i.kind == "documents" else value
            for i in given
            for name, value in i.values(tokens, layout).items()
        }

    words = " and ".join(i.words for i in given) + " counted from 1" * first
    numbers = [i.name for i in given if i.kind == "documents"]
    return Packing(
        *("", "documents", words, values),
        single=any(i.single for i in given),
        own=any(i.own for i in given),
        packed=True,
        beside=beside,
        ids=numbers[0] if numbers else "",
    )
