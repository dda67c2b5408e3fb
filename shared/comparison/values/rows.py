"""What was found as rows, in the order of the run, equal layers folded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from .found import NOWHERE, Found, Row
from .places import HEAD, Place


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
        ((row.order[0], 0), row)
        for row in (*found.pairs, *found.alone["left"])
    ]
    before = sorted((pair.order[1], pair.order[0]) for pair in found.pairs)
    for row in found.alone["right"]:
        at = max((n for r, n in before if r < row.order[1]), default=-1)
        placed.append(((at, 1), row))
    placed.sort(key=itemgetter(0))
    return _without_small_steps(
        _heads_joined(row for _, row in placed if row.why != NOWHERE)
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
    if row.difference is not None:
        return None
    return row.place.path, row.place.line, row.left is None, row.why


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
