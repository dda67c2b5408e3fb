"""The mode of torch that carries the codes through a model's operations.

A run leaves its Steps, and Notes of what its answer rests on.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_leaves as any_leaves

from ..running.collectives import is_collective
from ..running.operations import (
    COMPOSITE,
    TORCHS_OWN,
    UNSET,
    Operations,
    base_name,
    is_composite,
    is_view,
    lists_of,
    parts_of,
    tensors_in,
    written_by,
)
from ..running.places import Place, find_place
from ..running.ranks import in_fully_shard, local
from .call import PLACED, RULES, Call
from .codes import (
    CODES,
    FREE,
    KNOWN,
    LONGEST,
    LOWERED,
    WEAK,
    Shadow,
    Storages,
    as_lowered,
    full,
    lined_up,
    plain,
)
from .collectives import carry
from .rules import FORMULAS, MASKS, integers_of_routing, pointwise

# --- Notes of a run ----------------------------------------------------------

OUTSIDE = "outside"  # a tensor that no operation made


@dataclass
class Step:
    """An operation that was carried out, for the control and the way.

    Attributes:
        name: of the operation.
        place: where the model calls it.
        outs: its results; codes: theirs.
        call: what it was; None for a view, and where no codes are.
        routed: whether results that route tokens were taken as known.
    """

    name: str
    place: Place
    outs: list[Tensor]
    codes: list[Tensor]
    call: Call | None
    routed: bool = False


@dataclass
class Notes:
    """The grounds of a run, and the operations it did not understand.

    Each by its place: what Python code read of the tokens, which of these
    numbers left torch, which finite masks count as minus infinity, which do
    not, what is multiplied by nothing but 0, where a token may hide all that
    such a mask leaves, unknown operations, and losses of scores that depend on
    their targets.
    """

    reads: dict[Place, int] = field(default_factory=dict)
    left: dict[Place, str] = field(default_factory=dict)
    masks: dict[Place, float] = field(default_factory=dict)
    weak: dict[Place, float] = field(default_factory=dict)
    zeros: dict[Place, float] = field(default_factory=dict)
    padding: dict[Place, float] = field(default_factory=dict)
    unknown: dict[Place, str] = field(default_factory=dict)
    routed: dict[Place, float] = field(default_factory=dict)
    compared: dict[Place, str] = field(default_factory=dict)

    def joined(self, other: "Notes") -> "Notes":
        """Return what both runs rest on."""
        more = vars(other)
        return Notes(**{n: held | more[n] for n, held in vars(self).items()})


# --- The mode ----------------------------------------------------------------

# These read sizes from later arguments, which no tag says.
BY_SIZES = ("tensor_split", "_pack_padded_sequence", "_pad_packed_sequence")
# maximum and minimum, which have other rules
OF_TWO = (torch.ops.aten.max.other, torch.ops.aten.min.other)


def _read_by(func, name, args, tensors):
    """Return the tensors whose numbers choose a shape or a path.

    For an index these are the masks.
    """
    if name in ("index", "_unsafe_index"):
        return [t for t in tensors_in(args[1:]) if t.dtype in MASKS]
    if name in BY_SIZES:
        return tensors_in(args[1:])
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return tensors if any(tag in func.tags for tag in tags) else []


def _changed_by(result, tensors, written):
    """Return the results that are not views, and what else was written."""
    outs = tensors_in((result,))
    if not written:
        keys = {t.untyped_storage()._cdata for t in tensors}
        outs = [o for o in outs if o.untyped_storage()._cdata not in keys]
    return outs, [t for t in written if all(t is not o for o in outs)]


Memory = tuple[int, int]  # where it starts and ends


def _memory_of(tensor: Tensor) -> Memory | None:
    if tensor.device.type != "cpu":
        return None
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return (start, start + storage.nbytes()) if storage.nbytes() else None


def _overlap(one: Memory | None, other: Memory | None) -> bool:
    if one is None or other is None:
        return False
    return one[0] < other[1] and other[0] < one[1]


class Shadows(Operations):
    """Carries codes next to numbers.

    Args:
        parameters: tensors that can have any value, but for parameters of
            booleans and whole numbers.
        free: tensors that can.
        routing: whether integers that sort a token's own choices are taken
            as known.
        tape: called with each step; None: steps are not kept. One with
            views is called with these as well.
        blind: whether results carry no codes: the tape reads their numbers.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] = (),
        routing: bool = False,
        tape: Callable[[Step], None] | None = None,
        blind: bool = False,
        free: Iterable[Tensor] = (),
    ):
        super().__init__()
        self.storages = Storages()
        self.notes = Notes()
        self.routing, self.tape, self.blind = routing, tape, blind
        self.routed = False
        self.path = 0  # a hash of the operations that carried codes
        self.times_read = 0  # numbers, by operations and texts
        self.inside: list[Any] = []  # operations that are being taken apart
        self.coming: dict[int, Any] = {}  # codes from other ranks
        self.sent: list[Any] = []  # codes on their way to them
        # memory that no operation made: where each lies; what was written
        self.outside: dict[int, Memory] = {}
        self.written: list[Tensor] = []
        for parameter in map(local, parameters):
            for part in parts_of(parameter):
                self.mark(part, FREE)
        for tensor in map(local, free):
            for part in parts_of(tensor):
                self.storages.fill(part, FREE)

    def mark(self, tensor: Tensor, code: int | Tensor) -> None:
        """Say what the numbers of a tensor depend on."""
        if isinstance(code, int):
            number = tensor.is_floating_point() or tensor.is_complex()
            if code == FREE and isinstance(tensor, nn.Parameter):
                # nothing trains a mask: the prover varies it afterwards
                code = FREE if number else KNOWN
            self.storages.fill(tensor, code)
            return
        codes = lined_up(code.to(tensor.device), tensor.dim())
        self.storages.write(tensor, codes)

    def codes(self, tensor: Tensor) -> Tensor:
        """Return the codes of a tensor."""
        return self._shadow(tensor).view(tensor)

    def latest(self, tensor: Tensor) -> int:
        """Return the largest code of a tensor, KNOWN if it was never met."""
        found = [self.storages.find(part) for part in parts_of(local(tensor))]
        codes = [plain(s.codes).max() for s in found if s and s.codes.numel()]
        return max(map(int, codes), default=KNOWN)

    def _shadow(self, tensor: Tensor) -> Shadow:
        """Return a storage's codes; one never seen before is known."""
        key = tensor.untyped_storage()._cdata
        coming = self.coming and self.coming.pop(key, None)
        if coming:  # another rank sends the codes
            out, codes, work = coming
            work.wait()
            self.storages.write(out, codes.to(CODES))
        shadow = self.storages.find(tensor)
        if shadow is None:
            free = isinstance(tensor, nn.Parameter) or tensor.requires_grad
            free = free or in_fully_shard()  # it gathers weights in there
            self.mark(tensor, FREE if free else KNOWN)
            self._meet_outside(tensor)
            if not free:
                self._record(OUTSIDE, [tensor], None)
            shadow = self.storages.find(tensor)
            assert shadow is not None
        return shadow

    def _meet_outside(self, tensor: Tensor) -> None:
        """Note where memory lies: another may lie there, which was written."""
        memory = _memory_of(tensor)
        if memory is None:
            return
        self.outside[tensor.untyped_storage()._cdata] = memory
        if any(_overlap(_memory_of(t), memory) for t in self.written):
            self.mark(tensor, LONGEST)

    def _write_outside(self, tensors: list[Tensor]) -> None:
        """Let what lies in the same memory as a written tensor be anything."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self.outside or not self.storages.lives(key):
                continue
            self.written.append(tensor)  # no other memory lies there now
            for other, memory in self.outside.items():
                same = _overlap(_memory_of(tensor), memory)
                if other != key and same and self.storages.lives(other):
                    self.storages.refill(other, LONGEST)

    # --- Operations ---------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation, and give its results their codes."""
        kwargs = kwargs or {}
        if is_collective(func):
            return carry(self, func, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self._higher_order(func, args, kwargs)
        name = base_name(func)
        if is_view(func) and not tensors_in(args, lost=True):
            return self._view(func, name, args, kwargs)
        if (name not in RULES or func in OF_TWO) and is_composite(func):
            if name in BY_SIZES:
                self.read(name, tensors_in(args[1:]))
            # the kernel that a model runs: func.decompose imports sympy for
            # one in Python, in half a second
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        for out in tensors_in([kwargs["out"]]) if "out" in kwargs else ():
            if self.storages.is_new(out):
                self.mark(out, LONGEST)  # it holds what it held
        if self.blind:
            return self._watch(func, name, args, kwargs)
        return self._carry(func, name, args, kwargs)

    def _view(self, func, name, args, kwargs):
        """The codes belong to the storage, so that a view needs none."""
        self._meet(args)
        result = func(*args, **kwargs)
        if getattr(self.tape, "views", False):
            self._record(name, tensors_in((result,)), None)
        return result

    def _meet(self, args):
        """Return tensors in arguments; they are all seen now."""
        tensors = tensors_in(args)
        for tensor in tensors:
            if self.storages.is_new(tensor):
                self._shadow(tensor)
        return tensors

    def _watch(self, func, name, args, kwargs):
        """Give the results to the tape, which only reads their numbers."""
        tensors = self._meet((*args, *kwargs.values()))
        result = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return result
        written = written_by(func, args, kwargs)
        outs, others = _changed_by(result, tensors, written)
        for out in outs:
            self.storages.meet(out)  # it comes from no place outside
        if outs or others:
            self._record(name, outs + others, None)
        return result

    def _carry(self, func, name, args, kwargs):
        given = (*args, *kwargs.values())
        tensors = tensors_in(given)
        shadows = [self._shadow(t) for t in tensors]
        top = max((s.top for s in shadows), default=KNOWN)
        codes, before = {}, {}
        written = written_by(func, args, kwargs)
        keys = {t.untyped_storage()._cdata for t in written}
        for t in tensors if top > KNOWN and written else ():
            if t.untyped_storage()._cdata in keys:
                before[id(t)] = t.clone()
                codes[id(t)] = self.codes(t).clone()
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, TypeError):
            raise  # whatever the numbers are
        except Exception:
            if top > FREE:  # the model may catch it
                self.read(name, tensors)
            raise
        if torch.Tag.inplace_view in func.tags:
            return result  # other strides, the same numbers
        if top > KNOWN:
            self.read(name, _read_by(func, name, args, tensors))
        outs, others = _changed_by(result, tensors, written)
        if tensors_in((*given, result), lost=True):  # sparse ones, say
            if top > FREE:
                self.notes.left[find_place(name)] = f"{name} (sparse)"
            for out in outs + others:
                self.mark(out, LONGEST)
            return result
        if not (outs or others):
            return result
        if top > KNOWN:
            for t, shadow in zip(tensors, shadows, strict=True):
                codes.setdefault(id(t), shadow.view(t))
        call = Call(
            func, args, kwargs, codes, before, outs or others, self._note
        )
        call.hides, call.routing = top >= LOWERED + KNOWN, self.routing
        known = any(s.low == KNOWN for s in shadows)
        # a number of Python's that is 0 or a mask is known as well
        numbers = [a for a in args if isinstance(a, int | float)]
        known = known or any(a == 0 or a <= WEAK for a in numbers)
        call.special = call.hides or known
        found = self._find(call, name, top)
        for out, code in zip(call.outs, found, strict=True):
            self.storages.write(out, code)
        for other in others if outs else ():  # changed, and not returned
            self.mark(other, max(top, KNOWN))
        if top > FREE and written:
            self._write_outside(written)
        self._record(name, outs + others, call)
        return result

    def _find(self, call, name, top):
        """Return the codes of the results."""
        func, outs = call.func, call.outs
        random = torch.Tag.nondeterministic_seeded in func.tags
        if name in UNSET:
            return [full(LONGEST, o.dim(), o.device) for o in outs]
        if top == KNOWN and not random:
            return [full(KNOWN, o.dim(), o.device) for o in outs]
        self.path = hash((self.path, func))
        try:
            found, rule = None, RULES.get(name)
            if rule is not None:
                found = rule(call)
            elif (
                torch.Tag.pointwise in func.tags
                and func.namespace in TORCHS_OWN
            ):
                found = pointwise(call)
            if found is None:
                found, rule = self._decomposed(call), None
            fitting = self._fitted(found, outs)
        except Exception as error:
            fitting = None
            name = f"{name} ({type(error).__name__}: {error})"
        if fitting is None:
            most = call.everything()
            if int(most) > FREE:
                self.notes.unknown.setdefault(find_place(name), name)
            return [lined_up(most, o.dim()) for o in outs]
        if rule is not None:
            least = call.not_consulted()
            if least > KNOWN:
                fitting = [f.where(f >= least, least) for f in fitting]
            if name not in PLACED and call.is_low():
                fitting = [
                    as_lowered(f, f > FREE) if o.is_floating_point() else f
                    for f, o in zip(fitting, outs, strict=True)
                ]
        if self.routing:
            self._take_routing(call, fitting)
        return fitting

    def _fitted(self, found, outs):
        """Return codes that broadcast to the results, or None."""
        if found is None:
            return None
        found = found if isinstance(found, list) else [found] * len(outs)
        fitting = []
        for codes, out in zip(found, outs, strict=False):
            if codes.dim() > out.dim():
                codes = codes.reshape(codes.shape[codes.dim() - out.dim() :])
            codes = lined_up(codes, out.dim()).to(torch.int16)
            codes.expand(out.shape)  # raises where they do not fit
            fitting.append(codes)
        return fitting if len(fitting) == len(outs) else None

    def _take_routing(self, call, fitting):
        for index, routed in enumerate(integers_of_routing(call)):
            if routed and int(fitting[index].max()) > FREE:
                out = call.outs[index]
                fitting[index] = full(KNOWN, out.dim(), out.device)
                self._note("routed", 0, call.name)

    def _decomposed(self, call):
        """Follow what an operation is made of: a formula, or torch's table.

        One that writes is taken for the one that returns what it writes.
        """
        func, (args, kwargs) = call.func, call.positional
        parts = formula = FORMULAS.get(call.name)
        if formula is not None:
            args, kwargs = (call.args,), {}
        elif torch.Tag.nondeterministic_seeded in func.tags:
            return None  # it would draw once more
        elif not func._schema.is_mutable:
            parts = decomposition_table.get(func)
        elif func.namespace in TORCHS_OWN and len(call.results) < 2:
            parts = getattr(torch.ops.aten, call.name, None)
            args, kwargs = call.before_it_wrote(self.mark)
        if parts is None or func in self.inside:
            return None  # one that writes may have no form that returns
        self.inside.append(func)
        try:
            with self:
                results = tensors_in((parts(*args, **kwargs),))
        finally:
            self.inside.pop()
        found = [self.codes(r) for r in results]
        shapes = [r.shape for r in results]
        if formula is not None and found:  # of no more than the first
            found += [found[0].amax() for _ in call.outs[len(found) :]]
        fits = shapes == [o.shape for o in call.outs[: len(shapes)]]
        return found if fits and len(found) == len(call.outs) else None

    def _higher_order(self, func, args, kwargs):
        """Follow what an operator of operators runs, where it can be."""
        name = getattr(func, "__name__", str(func))
        if name == "flex_attention":  # by the operator's own eager formula
            from torch._higher_order_ops.flex_attention import math_attention

            # no codes follow what the compiled kernel reads of them
            self.read(name, lists_of(args[4]))
            with self:
                return math_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        tensors = tensors_in(any_leaves((args, kwargs)))
        most = max((self._shadow(t).top for t in tensors), default=FREE)
        for out in tensors_in(any_leaves(result)):
            self.mark(out, max(most, FREE))
        self.notes.unknown.setdefault(find_place(name), name)
        return result

    def copied(self, source: Tensor, made: Tensor) -> None:
        """Give a deep copy the codes of its source."""
        self._shadow(source)
        self.storages.copy(source, made)
        self._record("clone", [made], None)

    # --- Notes --------------------------------------------------------------

    def _note(self, kind: str, number: float, name: str = "mask") -> None:
        place, notes = find_place(name), getattr(self.notes, kind)
        notes[place] = max(number, notes.get(place, number))
        self.routed |= kind == "routed"

    def read(
        self, name: str, tensors: list[Tensor], left: bool = False
    ) -> None:
        """Note that Python code reads numbers, if they are not known.

        Left is whether they leave torch: they may come back as others.
        """
        most = KNOWN
        self.times_read += 1
        for tensor in tensors:
            if tensor.numel():
                most = max(most, int(self.codes(tensor).max()))
        if most == KNOWN:
            return
        place = find_place(name)
        if left and most > FREE:
            self.notes.left[place] = name
        known = self.notes.reads.get(place, KNOWN)
        self.notes.reads[place] = max(known, most)

    def _record(self, name, outs, call) -> None:
        if self.tape is None or self.inside:
            return
        if self.blind:  # the tape knows the line from the run before
            self.tape(Step(name, Place("", 0, name), outs, [], None))
            return
        codes = [self.storages.codes(o).clone() for o in outs]
        step = Step(name, find_place(name), outs, codes, call, self.routed)
        self.routed = False
        self.tape(step)
