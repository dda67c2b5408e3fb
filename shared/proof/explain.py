"""Say in words why a proof is open, and find the line that causes it."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..running.errors import sentence
from ..running.places import Place
from ..running.ways import Case
from .codes import LONGEST
from .culprit import Tape, in_words
from .engine import Found, Order, follow
from .proof import Open, leaves_torch
from .runs import Runs, Text

CLEAR = (7, 5, 11)  # lengths that are seldom another size
FOLLOWED = 130  # tokens of the longest text in which a way is followed


@dataclass(frozen=True)
class Explained:
    """The reasons why a case is open.

    Attributes:
        open: a sentence for each thing.
        culprit: the line that lets a token through, if known.
        way: it between the lines before and after, in words.
        in_chunks: whether it shows in chunks of a padded text.
        at_length: whether it is about the length at which it was found.
        position: whose score depends on a token that it must not see.
    """

    open: tuple[Open, ...]
    culprit: Place | None = None
    way: str = ""
    in_chunks: bool = False
    at_length: bool = True
    position: int | None = None


def explain(
    runs: Runs,
    case: Case,
    time: int,
    order: Order,
    found: Found,
    routing: bool,
) -> Explained:
    """Say what a run showed to be open, and the way of a token through it.

    Args:
        runs: the model.
        case: how it ran.
        time: the length of the text.
        order: in which the run was followed.
        found: what the run showed.
        routing: whether routing counted as known.
    """
    left = found.notes.left.items()
    if left:
        each = tuple(leaves_torch(place, name) for place, name in left)
        return Explained(each, at_length=False)
    known = [*_not_understood(found)]
    how = f"at length {time} {case.name}{runs.after}"
    if order.losses:
        return Explained((*known, *_loss_depends(found, how)))
    reaches = _reaches(case, order, found)
    try:
        way = _find_way(runs, case, time, order, routing)
    except Exception as error:  # it adds to what is known
        known.append(Open(f"the way is not known ({sentence(error)})"))
        way = _Way()
    words, culprit = in_words([*way.lines]), way.culprit
    text = f"{how} {reaches}"
    if culprit is not None:
        by = f" by {words}" if words else ""
        text = f"{culprit} lets it through: {reaches}{by} ({how})"
    known.append(Open(text, culprit))
    _, position = found.open(case.shown(*found.reached.shape))[0]
    return Explained(
        tuple(known), culprit, words, way.in_chunks, position=position
    )


def _not_understood(found: Found) -> Iterator[Open]:
    """Yield masks that are too weak, and operations that have no rule."""
    for place, number in found.notes.weak.items():
        text = f"{place} hides with {number:,.0f}, which scores can outweigh"
        yield Open(text, place)
    for place, name in found.notes.unknown.items():
        yield Open(f"{place}: no rule for {name}", place)


def _loss_depends(found: Found, how: str) -> Iterator[Open]:
    """Yield the losses that depend on their target, or on a later one."""
    for place in found.notes.compared:
        text = "which token each row of its scores may see is not known"
        yield Open(f"{place}: {text} ({how})", place)
    if not found.notes.compared:
        text = "the loss depends on tokens other than by its cross-entropies"
        yield Open(f"{text} ({how})")


def _reaches(case: Case, order: Order, found: Found) -> str:
    """Say which token, row or document reaches which score."""
    row, position = found.open(case.shown(*found.reached.shape))[0]
    code = int(found.reached[row, position])
    if order.name != "positions":
        at = f", position {position}" * (order.name != "rows")
        return f"another {order.name[:-1]} reaches the scores of row {row}{at}"
    if code >= LONGEST:
        return (
            f"memory that no operation was seen to write reaches the "
            f"score of position {position}"
        )
    shape = found.reached.shape
    codes = order.codes(*shape)[row].tolist()
    what = f"token {codes.index(code)}" if code in codes else "a later target"
    return f"{what} reaches the score of position {position}"


def _orders_at(
    runs: Runs, case: Case, text: Text, order: Order
) -> tuple[Order, ...]:
    """Return the orders of a text in which something may be open."""
    if order.bounds is None:
        return (order,)
    return runs.orders_of(case, text.tokens)  # they differ by the length


@dataclass(frozen=True)
class _Way:
    """The way of a token: the culprit between the lines before and after."""

    culprit: Place | None = None
    lines: tuple[Place, ...] = ()
    in_chunks: bool = False


def _find_way(
    runs: Runs, case: Case, time: int, order: Order, routing: bool
) -> _Way:
    """Find it at a length that is not another size, if it shows there."""
    run, rows = runs.of(case), order.name == "rows"
    clear = [t for t in CLEAR if t != time and t in runs.lengths]
    for length in [*clear, time] if time <= FOLLOWED else ():
        text, reverse = runs.text(case, length), None
        shape, given = text.tokens.shape, (text.tokens, text.targets)
        for other in runs.orders if rows else ():
            if other is not order:
                reverse = Tape(other.codes(*shape), rows)
                follow(run, *given, other, routing, reverse)
        for each in _orders_at(runs, case, text, order):
            tape = Tape(each.allowed(*shape), rows, reverse)
            found = follow(run, *given, each, routing, tape)
            if found.open(case.shown(*shape)):
                place, lines = tape.culprit()
                unknown = next(iter(found.notes.unknown), None)
                return _Way(unknown or place, tuple(lines), tape.in_chunks)
    return _Way()
