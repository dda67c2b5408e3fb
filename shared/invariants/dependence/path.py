"""The way of a token to a score, by the lines it takes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..places import Place
from .call import Call
from .lattice import CODES, FREE, HIDDEN, KNOWN, is_hidden, plain
from .notes import OUTSIDE, Step
from .shadows import Shadows

MOST = HIDDEN - 8  # numbers that are told apart at once
STEPS = 2000
NEAR = 12  # steps from a product of attention to its softmax
PRODUCTS = ("bmm", "mm", "baddbmm", "mul", "sum", "add")
SOFTMAX = ("_softmax", "_safe_softmax", "_log_softmax")
# Lines that a reader does not look for.
QUIET = (
    *("clone", "_to_copy", "_unsafe_view", "copy", "detach", "add", "div"),
    *("native_layer_norm", "native_dropout", "alias", "contiguous"),
)


@dataclass(frozen=True)
class Stop:
    """A number on a way: the step that computed it, and which it is."""

    step: Step
    out: int
    element: int

    def stand(self, rows: int, time: int, by_time: bool) -> int | None:
        """Return its position in the text, or its row, where shapes tell.

        An axis is known by its size, also of rows and positions in one.
        """
        rest = self.element
        wanted = time if by_time else rows
        shape = self.step.outs[self.out].shape
        for axis, size in enumerate(shape):
            inner = math.prod(shape[axis + 1 :])
            if size == wanted:
                return rest // inner
            if size == rows * time:
                at = rest // inner
                return at % time if by_time else at // time
            rest %= inner
        return None


@dataclass
class _Kept:
    """A step, with what its arguments were."""

    step: Step
    func: Any
    args: Any
    kwargs: Any
    given: list[tuple[Tensor, Tensor, int, list[int]]]  # clone, codes, ...


class Trail:
    """Keeps the steps of a run, and follows a number back through them.

    Args:
        parameters: the model's.
        routing: as Shadows takes it.
    """

    def __init__(self, parameters: Iterable[Tensor], routing: bool = False):
        self.parameters = list(parameters)
        self.weights = {p.untyped_storage()._cdata for p in self.parameters}
        self.shadows = Shadows(self.parameters, routing, self._keep)
        self.kept: list[_Kept] = []
        self.writers: dict[int, list[int]] = {}
        self.alive: list[Tensor] = []

    def _keep(self, step: Step) -> None:
        if step.name == OUTSIDE or step.call is None:
            return
        call, codes = step.call
        given: list[tuple[Tensor, Tensor, int, list[int]]] = []
        copies: dict[int, Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) not in codes:
                return value
            if id(value) not in copies:
                key = value.untyped_storage()._cdata
                copy = call.before.get(id(value), value).detach()
                if key not in self.weights:
                    copy = copy.clone()
                copies[id(value)] = copy
                given.append(
                    (
                        copy,
                        codes[id(value)].clone(),
                        len(self.alive),
                        list(self.writers.get(key, ())),
                    )
                )
                self.alive.append(value)
            return copies[id(value)]

        args, kwargs = tree_map(copied, call.positional)
        for out in step.outs:
            key = out.untyped_storage()._cdata
            self.writers.setdefault(key, []).append(len(self.kept))
            self.alive.append(out)
        self.kept.append(_Kept(step, call.func, args, kwargs, given))

    def back(
        self, score: Tensor, element: int, code: int
    ) -> tuple[int, list["Stop"]]:
        """Return a token's code, from this one on, and its way to a score."""
        key = score.untyped_storage()._cdata
        offset = int(_offsets(score).flatten()[element])
        writers = self.writers.get(key, [])
        stops: list[Stop] = []
        token = code
        while len(stops) < STEPS:
            at = self._written(writers, offset)
            if at is None:
                break
            number, out, index = at
            kept = self.kept[number]
            stops.append(Stop(kept.step, out, index))
            found = self._before(kept, out, index, code)
            if found is None:
                break
            argument, place = found
            _, codes, alive, writers = kept.given[argument]
            given = self.alive[alive]
            token = int(plain(codes).expand(given.shape).flatten()[place])
            offset = int(_offsets(given).flatten()[place])
        return token, stops[::-1]

    def _written(
        self, writers: list[int], offset: int
    ) -> tuple[int, int, int] | None:
        """Return the last step that wrote a place, and where it did."""
        for number in reversed(writers):
            for index, out in enumerate(self.kept[number].step.outs):
                at = (_offsets(out).flatten() == offset).nonzero()
                if len(at):
                    return number, index, int(at[0])
        return None

    def _before(
        self, kept: _Kept, out: int, element: int, code: int
    ) -> tuple[int, int] | None:
        """Return an argument and its element that carry a code on.

        Numbers that do are told apart by codes of their own, and the rule
        says which reaches the element.
        """
        found: list[tuple[int, int]] = []  # those that could, the best last
        for index, (copy, codes, _, _) in enumerate(kept.given):
            own = plain(codes).expand(copy.shape).flatten()
            at = (own >= code).nonzero().flatten()
            at = at[own[at].argsort(descending=True, stable=True)]
            found = [(index, int(i)) for i in at.tolist()] + found
        while found:
            some, found = found[-MOST:], found[:-MOST]
            reached = self._reached(kept, out, element, some)
            if reached is not None:
                return some[reached]
        return None

    def _reached(
        self,
        kept: _Kept,
        out: int,
        element: int,
        some: list[tuple[int, int]],
    ) -> int | None:
        shadows = Shadows(self.parameters)
        marked: dict[int, Tensor] = {}
        for index, (copy, codes, _, _) in enumerate(kept.given):
            own = codes.expand(copy.shape).flatten().clone()
            hidden = is_hidden(own)
            own = torch.where(plain(own) > FREE, FREE, plain(own)).to(CODES)
            pairs = [(n, i) for n, (arg, i) in enumerate(some) if arg == index]
            if pairs:
                numbers, at = torch.tensor(pairs, device=own.device).T
                own[at] = numbers.to(CODES)
            own = torch.where(hidden & (own > KNOWN), own + HIDDEN, own)
            marked[id(copy)] = own.view(copy.shape)
            shadows.mark(copy, marked[id(copy)])
        outs = [o.detach() for o in kept.step.outs]
        call = Call(
            kept.func, kept.args, kept.kwargs, marked, {}, outs, _silent
        )
        with torch.no_grad():
            results = shadows._find(call, kept.step.name, MOST)
        code = plain(results[out]).expand(outs[out].shape).flatten()[element]
        return int(code) if int(code) >= 0 else None


def lines(stops: list[Stop]) -> list[Place]:
    """Return the lines of a way that a reader looks for."""
    steps = [stop.step for stop in stops]
    steps = [s for s in steps if s.name not in QUIET] or steps
    return list(dict.fromkeys(step.place for step in steps))


def culprit(
    stops: list[Stop], shape: tuple[int, int], by_time: bool, at: int
) -> Place | None:
    """Return the line where a token gets among numbers of another position.

    Scores of attention pair all positions: there it is the softmax, from
    which the pair was not hidden. The shape is the tokens' own; at is the
    token's position, or its row.
    """
    for number, stop in enumerate(stops):
        if stop.stand(*shape, by_time) == at:
            continue
        after = [s.step for s in stops[number : number + NEAR]]
        softmax = [s.place for s in after if s.name in SOFTMAX]
        if stop.step.name in PRODUCTS and softmax:
            return softmax[0]
        return stop.step.place
    return stops[-1].step.place if stops else None


def _offsets(tensor: Tensor) -> Tensor:
    """Return where in its storage each number of a tensor lies."""
    result = torch.full((), int(tensor.storage_offset()))
    for axis, (size, step) in enumerate(
        zip(tensor.size(), tensor.stride(), strict=True)
    ):
        shape = [1] * tensor.dim()
        shape[axis] = size
        result = result + (torch.arange(size) * step).view(shape)
    return result.expand(tensor.shape)


def _silent(kind: str, number: float) -> None:
    """Note nothing: the run itself has."""
