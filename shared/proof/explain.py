"""Explain why a proof is open: which line may let a token through."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from jaxtyping import Bool
from torch import Tensor

from ..running.errors import sentence
from ..running.places import Place
from ..running.ranks import current, union
from ..running.ways import Case
from .codes import LONGEST, SIGN
from .culprit import Cut, Line, Tape, in_words
from .engine import Found, Order, follow
from .proof import Open, leaves_torch
from .runs import Runs, Text

CLEAR = (7, 5, 11)  # lengths that other axes of a tensor seldom have
FOLLOWED = 130  # most tokens in a text that is searched for a culprit


@dataclass(frozen=True)
class Explained:
    """The reasons why a case is not proved.

    Attributes:
        open: a sentence for each reason.
        culprit: the line that lets a token through, if it is known.
        way: the culprit with the lines before and after it, in words.
        in_chunks: whether the leak arises in chunks of a padded text.
        at_length: whether the reasons hold for this length of text only.
        position: a position whose score depends on a forbidden token.
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
    """Return why a run left the proof open, and the path of a token.

    Args:
        runs: the model.
        case: the case.
        time: the length of the text.
        order: the order in which the proof stayed open.
        found: the result of the run.
        routing: whether integers that route tokens counted as known.
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
    except Exception as error:  # a fault of the kit is one more reason
        known.append(Open(f"the path is not known ({sentence(error)})"))
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
    """Yield a reason for each mask that is too weak and each missing rule."""
    for place, number in found.notes.weak.items():
        text = f"{place} hides with {number:,.0f}, which scores can outweigh"
        yield Open(text, place)
    for place, name in found.notes.unknown.items():
        yield Open(f"{place}: no rule for {name}", place)


def _loss_depends(found: Found, how: str) -> Iterator[Open]:
    """Yield a reason for each loss whose scores may depend on their target."""
    for place in found.notes.compared:
        text = "which token each row of its scores may see is not known"
        yield Open(f"{place}: {text} ({how})", place)
    if not found.notes.compared:
        text = "the loss depends on tokens other than by its cross-entropies"
        yield Open(f"{text} ({how})")


def _reaches(case: Case, order: Order, found: Found) -> str:
    """Say in words which token, row or document reaches which score."""
    row, position = found.open(case.shown(*found.reached.shape))[0]
    code = int(found.reached[row, position])
    if order.name != "positions":
        at = f", position {position}" * (order.name != "rows")
        return f"another {order.name[:-1]} reaches the scores of row {row}{at}"
    if code >= LONGEST:
        memory = "memory that no operation was seen to write"
        what = "the sign of a masked 0" if code == SIGN else memory
        return f"{what} reaches the score of position {position}"
    shape = found.reached.shape
    codes = order.codes(*shape)[row].tolist()
    what = f"token {codes.index(code)}" if code in codes else "a later target"
    return f"{what} reaches the score of position {position}"


def _orders_at(
    runs: Runs, case: Case, text: Text, order: Order
) -> tuple[Order, ...]:
    """Return the orders (engine.py) of a text that may show the leak."""
    if order.bounds is None:
        return (order,)
    return runs.orders_of(case, text.tokens)  # these depend on the length


@dataclass(frozen=True)
class _Way:
    """The path of a token: the culprit, and the lines before and after it."""

    culprit: Place | None = None
    lines: tuple[Place, ...] = ()
    in_chunks: bool = False


def _find_way(
    runs: Runs, case: Case, time: int, order: Order, routing: bool
) -> _Way:
    """Find a token's path, if possible at a length that no other axis has."""
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
            again = partial(follow, run, *given, each, routing)
            found, shown = again(tape), case.shown(*shape)
            late = found.open(shown)
            if not late:
                continue
            closes = partial(_closes, again, shown, late[0])
            if current() is None:
                tape.blame(closes)
            else:  # each rank must try to cut the same lines
                cut = {line: closes(line) for line in union(tape.lines())}
                tape.blame(cut.__getitem__)
            place, lines = tape.culprit()
            unknown = next(iter(found.notes.unknown), None)
            return _Way(unknown or place, tuple(lines), tape.in_chunks)
    return _Way()


def _closes(
    again: Callable[[Cut], Found],
    shown: Bool[Tensor, "batch time"],
    late: list[int],
    line: Line,
) -> bool:
    """Return whether cutting a line keeps the token from the score."""
    return late not in again(Cut(line)).open(shown)
