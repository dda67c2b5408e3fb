"""What was found as rows, in the order of the run, equal layers folded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from .found import NOWHERE, Found
from .places import HEAD, Place


@dataclass(frozen=True)
class Row:
    """One line of the left, of the right, or of both.

    Attributes:
        left: the line of the left, None where only the right has it.
        right: the line of the right, None where only the left has it.
        shape: of the value.
        difference: the largest absolute one, None for a line alone.
        note: what is known about a line alone.
        order: number of the value in the left's run and in the right's.
        times: how many values these lines compute in turn, head by head.
    """

    left: Place | None
    right: Place | None
    shape: tuple[int, ...]
    difference: float | None = None
    note: str = ""
    order: tuple[int | None, int | None] = (None, None)
    times: int = 1

    @property
    def layer(self) -> int | None:
        """The layer of either."""
        places = [p for p in (self.left, self.right) if p is not None]
        return next((p.layer for p in places if p.layer is not None), None)

    @property
    def key(self) -> object:
        """What is the same in each layer that does the same."""
        sides = [p and replace(p, layer=None) for p in (self.left, self.right)]
        return *sides, self.shape


@dataclass(frozen=True)
class Section:
    """Rows of one layer, or between layers.

    Attributes:
        layers: numbers of the layers with these rows, the first one's shown;
            none between layers.
        rows_by_layer: for each layer its rows, in the order of the run.
    """

    layers: tuple[int, ...]
    rows_by_layer: Sequence[Sequence[Row]]

    @property
    def rows(self) -> Sequence[Row]:
        """The rows that stand for all layers: the first one's."""
        return self.rows_by_layer[0]

    @property
    def largest(self) -> float | None:
        """The largest difference in all layers; None without pairs."""
        apart = [
            row.difference
            for rows in self.rows_by_layer
            for row in rows
            if row.difference is not None
        ]
        return max(apart, default=None)


def rows_of(found: Found) -> list[Row]:
    """Return pairs and lines alone in the order of the run.

    A line alone on the right stands behind the pair before it. What
    follows a parting is left out: it is different, as a matter of course.
    """
    placed = [
        (
            (p.order[0], 0),
            Row(p.left, p.right, p.shape, p.difference, "", p.order),
        )
        for p in found.pairs
    ]
    before = sorted((pair.order[1], pair.order[0]) for pair in found.pairs)
    for one in found.alone["left"]:
        row = Row(one.place, None, one.shape, None, one.why, (one.order, None))
        placed.append(((one.order, 0), row))
    for one in found.alone["right"]:
        row = Row(None, one.place, one.shape, None, one.why, (None, one.order))
        at = max((n for r, n in before if r < one.order), default=-1)
        placed.append(((at, 1), row))
    placed.sort(key=itemgetter(0))
    return _without_small_steps(
        _heads_joined(row for _, row in placed if row.note != NOWHERE)
    )


def _heads_joined(rows: Iterator[Row]) -> list[Row]:
    """Make one row of what is computed head by head, or several times."""
    found: dict[object, Row] = {}
    for row in map(_unheaded, rows):
        key = row.layer, row.key
        if first := found.get(key):
            apart = [first.difference, row.difference]
            row = replace(
                first,
                difference=max(
                    (a for a in apart if a is not None), default=None
                ),
                times=first.times + 1,
            )
        found[key] = row
    return list(found.values())


def _without_small_steps(rows: Sequence[Row]) -> list[Row]:
    """Leave of lone steps in one line the last, which holds the others."""
    found: list[Row] = []
    for row in rows:
        last = found[-1] if found else None
        if last is not None and _line(last) == _line(row) is not None:
            found.pop()
        found.append(row)
    return found


def _line(row: Row) -> object:
    """What neighbouring steps of one line have in common, if it is alone."""
    place = row.left or row.right
    if place is None or row.difference is not None:
        return None
    return place.path, place.line, row.left is None, row.note


def _unheaded(row: Row) -> Row:
    def plain(place: Place | None) -> Place | None:
        if place is None:
            return None
        return replace(place, inside=HEAD.sub("", place.inside))

    return replace(row, left=plain(row.left), right=plain(row.right))


def sections_of(
    rows: Sequence[Row], layer: int | None = None
) -> list[Section]:
    """Group rows by layers, and fold layers that do as the one before."""
    sections: list[Section] = []
    for number, group in groupby(rows, key=lambda row: row.layer):
        if layer is not None and number != layer:
            continue
        own = list(group)
        last = sections[-1] if sections else None
        if number is None or last is None or not _alike(last.rows, own):
            layers = () if number is None else (number,)
            sections.append(Section(layers, [own]))
            continue
        sections[-1] = Section(
            (*last.layers, number), [*last.rows_by_layer, own]
        )
    return sections


def _alike(ours: Sequence[Row], theirs: Sequence[Row]) -> bool:
    """Whether two layers pair the same lines."""
    return [(r.key, r.times) for r in ours] == [
        (r.key, r.times) for r in theirs
    ]


def left_out(found: Found) -> dict[str, int]:
    """Return for each side how many lines behind the parting are not shown."""
    return {
        side: sum(alone.why == NOWHERE for alone in lines)
        for side, lines in found.alone.items()
    }
