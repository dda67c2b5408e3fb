"""Pack documents in one row, and tell a model where they are."""

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

PROMISES = "documents", "cu_seqlens"  # kinds that promise isolated documents
PLACES = (*PROMISES, "positions", BLOCKS, FOUR_AXES)
INTEGERS = [case for case in MASKED if not case.boolean]


class Beside(Enum):
    """Attention masks that may be given together with documents, in words."""

    NOTHING = ""
    ONES = " and an attention mask of ones"
    HIDES = " and an attention mask that hides the last document"


class Numbering(Enum):
    """Unusual ways to number documents (not 0, 1, 2, ...), in words."""

    LARGE = "large ids with gaps"
    IN_TURNS = "two ids in turns"


@dataclass(frozen=True)
class Packing(Input):
    """A way to tell a model where the documents in a row are.

    Attributes:
        mark: the id of the token that separates documents.
        ends: whether the mark ends a document; otherwise it begins one.
        beside: the attention masks that can be given besides the arguments.
        ids: the argument that numbers the documents; "" for none.
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
        """Return a case (way to call) whose documents have these lengths.

        Args:
            lengths: returns the document lengths of a row, given the row's
                length and its place in the batch.
            training: whether the model is in train mode.
            beside: the attention mask that is given besides the arguments.
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
        """Return whether this packing gives the argument with that name."""
        with suppress(Exception):  # the call itself will raise again
            return name in self.make(tokens)
        return False

    def numbered(self, numbering: Numbering) -> "Packing":
        """Return the same packing, but with other ids for the documents."""
        name, number = self.ids, NUMBERS[numbering]

        def values(tokens: Tensor, layout: Layout) -> dict[str, Any]:
            made = self.values(tokens, layout)
            return made | {name: number(made[name])}

        words = f"{self.words} ({numbering.value})"
        return replace(self, words=words, values=values)

    def text(
        self, lengths: list[int], tokens: Int[Tensor, "rows time"]
    ) -> Int[Tensor, "rows time"]:
        """Return the tokens, with the mark wherever two documents meet."""
        if self.mark is None:
            return tokens
        ends = torch.tensor(lengths).cumsum(0)[:-1] - int(self.ends)
        return tokens.index_fill(1, ends, self.mark)

    def without_cache(self, subject: Subject) -> "Packing | None":
        """Return this packing and use_cache=False, if calls take that flag."""
        caller = subject.caller
        if "use_cache" not in (*caller.arguments, *caller.own_arguments):
            return None
        return replace(
            self,
            words=f"{self.words} with use_cache=False",
            values=lambda *of: self.values(*of) | {"use_cache": False},
        )


# Ids of documents other than 0, 1, 2, ...: some that 16 or 8 bits cannot
# distinguish, some with gaps, and two that alternate.
LARGE = 0, 256, 257, 300, 2048, 2049, 2060, 2061
NUMBERS: dict[Numbering, Callable[[Tensor], Tensor]] = {
    Numbering.LARGE: lambda ids: (
        ids.div(8, rounding_mode="floor") * 2062
        + torch.tensor(LARGE, device=ids.device, dtype=ids.dtype)[ids % 8]
    ),
    Numbering.IN_TURNS: lambda ids: 1 + ids % 2,
}
UNLIKE = 4  # rows that a proof follows, each with other document lengths


def split(time: int, place: int = 0) -> list[int]:
    """Return the lengths of the documents in a row that a proof follows.

    The first row has few documents, the second has one per token, the third
    has random boundaries, and the fourth has two, of unequal lengths.
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
    """Return lengths of up to `count` documents, with random boundaries."""
    # Python's generator, because a proof would track torch's numbers as inputs
    few = min(count, time) - 1
    ends = [0, *sorted(Random(time).sample(range(1, time), few)), time]
    return [end - start for start, end in pairwise(ends)]


def promised(subject: Subject) -> bool:
    """Return whether the user or an argument promises isolated documents."""
    kinds = {given.kind for given in subject.caller.inputs}
    return subject.documents is not None or bool(kinds & {*PROMISES})


def packings(subject: Subject) -> list[Packing]:
    """Return the ways to give documents to the model.

    If isolated documents are promised, one of these ways must isolate them.

    A way that itself includes an attention mask gets no second one.
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
    """Join arguments in one packing that numbers documents from `first`."""
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
