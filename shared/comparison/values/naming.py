"""Values paired by names: those of a user's table, or of their lines."""

from collections.abc import Callable, Hashable, Iterable, Iterator

from ...invariants.places import Place
from .recording import name_of
from .side import Side
from .value import Value

LAYER = "{i}"  # in a name stands for the number of each layer


def pair_by_name(
    sides: tuple[Side, Side], table: Iterable[tuple[str, str]]
) -> list[tuple[int, int]]:
    """Return the numbers of the values that a table pairs.

    A name is that of an array, of a module (its output is meant), or a
    line's as in a recording: "layer 0 model.py:43 ln_1".

    Raises:
        ValueError: for a name that is on neither or one side alone.
    """
    layers = [v.place.layer or 0 for side in sides for v in side.values]
    found: dict[tuple[int, int], None] = {}
    for names in table:
        each = any(LAYER in name for name in names)
        known = [
            [_numbers(*of, i) for of in zip(sides, names, strict=True)]
            for i in (range(max(layers) + 1) if each else [None])
        ]
        for k, side in enumerate(("left", "right")):
            if not any(both[k] for both in known):
                raise ValueError(
                    f"no value of the {side} is named {names[k]!r}"
                )
        found |= {(a[-1], b[-1]): None for a, b in known if a and b}
    return [*found]


def _numbers(side: Side, name: str, layer: int | None) -> list[int]:
    """Return the numbers of a name's values, of one layer if it is given."""
    whole = name.replace(LAYER, str(layer))
    return [
        v.number
        for v in side.values
        if whole in (v.place.function, v.place.module, name_of(v.place))
        and not v.place.inside
        and (layer is None or LAYER in name or v.place.layer == layer)
    ]


def pair_lines(
    left: Side, right: Side, name: Callable[[Place], Hashable]
) -> Iterator[tuple[Value, Value]]:
    """Yield values of lines of one name that both sides run as often."""
    found: tuple[dict[Hashable, list[Value]], ...] = ({}, {})
    for lines, side in zip(found, (left, right), strict=True):
        for value in side.values:
            lines.setdefault(name(value.place), []).append(value)
    for line, values in found[0].items():
        others = found[1].get(line, [])
        if len(values) == len(others):
            yield from zip(values, others, strict=True)
