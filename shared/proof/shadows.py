"""Carry dependency codes through a model's operations, by a torch mode.

A run records its steps, and notes about the assumptions of the proof.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from types import FunctionType
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
    lists_of,
    parts_of,
    tensors_in,
)
from ..running.places import Place, find_place
from ..running.ranks import in_fully_shard, local
from .answers import NEW, Answer, Answers, Given, Noted, Unread, keep
from .call import (
    PLACED,
    RULES,
    SCALARS,
    Call,
    facts_of,
    facts_of_replaced,
    replaced_kernels,
    sorted_tensors,
)
from .codes import (
    CODES,
    FREE,
    KNOWN,
    LONGEST,
    LOWERED,
    SIGN,
    WEAK,
    Codes,
    Shadow,
    Storages,
    as_dtype,
    as_lowered,
    bounds_of,
    codes_of,
    full,
    is_constant,
    lined_up,
    plain,
)
from .collectives import carry
from .rules import FORMULAS, MASKS, integers_of_routing, pointwise

# --- Notes of a run ----------------------------------------------------------

OUTSIDE = "outside"  # name of a step: a tensor that no operation returned


@dataclass
class Step:
    """An operation that ran, for tests of rules and explanations of paths.

    Attributes:
        name: the operation's name, or OUTSIDE.
        place: the line of the model that calls the operation.
        outs: the results; codes: their codes.
        call: the operation; None for views, and in runs without codes.
        routed: whether the results are integers that route tokens, and so
            counted as known.
        lows: for each result, a lower bound of its codes.
    """

    name: str
    place: Place
    outs: list[Tensor]
    codes: list[Tensor]
    call: Call | None
    routed: bool = False
    lows: list[int] = field(default_factory=list)


@dataclass
class Notes:
    """The assumptions of a run, and its unknown operations.

    Each note has a place in the model's code.

    Attributes:
        reads, left: entries that Python code reads, or that leave torch.
        masks, weak: finite masks that hide scores, and masks that do not.
        zeros: factors that are 0 everywhere.
        padding: where a token, weight or draw may hide all that a mask shows.
        voids: where it may hide all numbers of a row, which is then NaN.
        nans: where such a NaN would become a finite number.
        unknown: operations without a rule.
        routed: tokens that choose a route.
        compared: losses whose scores may depend on their targets.
    """

    reads: dict[Place, int] = field(default_factory=dict)
    left: dict[Place, str] = field(default_factory=dict)
    masks: dict[Place, float] = field(default_factory=dict)
    weak: dict[Place, float] = field(default_factory=dict)
    zeros: dict[Place, float] = field(default_factory=dict)
    padding: dict[Place, float] = field(default_factory=dict)
    voids: dict[Place, float] = field(default_factory=dict)
    nans: dict[Place, float] = field(default_factory=dict)
    unknown: dict[Place, str] = field(default_factory=dict)
    routed: dict[Place, float] = field(default_factory=dict)
    compared: dict[Place, str] = field(default_factory=dict)

    def joined(self, other: "Notes") -> "Notes":
        """Return the notes of both runs; each place keeps its largest note."""
        found = Notes()
        for name, notes in vars(found).items():
            for run in (self, other):
                for place, note in vars(run)[name].items():
                    notes[place] = max(note, notes.get(place, note))
        return found


def _any_special(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a Python number is 0, or large enough to hide a score."""
    return any(
        isinstance(a, SCALARS) and (a == 0 or abs(a) >= -WEAK)
        for a in (*args, *kwargs.values())
    )


# --- The mode ----------------------------------------------------------------

# Operations that read sizes from later arguments, although no tag says so.
BY_SIZES = ("tensor_split", "_pack_padded_sequence", "_pad_packed_sequence")
# overloads that read the sizes of a packed batch from their second argument
RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")
PACKED = {getattr(torch.ops.aten, name).data for name in RECURRENT}
# overloads to decompose, although the operation's other overloads have a rule
DECOMPOSED = {torch.ops.aten.max.other, torch.ops.aten.min.other}
DECOMPOSED.add(torch.ops.aten.where.default)
DECOMPOSED |= {
    getattr(torch.ops.aten, name).vec
    for name in (
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
        *(f"_upsample_nearest_exact{axes}d" for axes in (1, 2, 3)),
    )
}
VIEW_AS = torch.ops.aten.view.dtype  # a view as numbers of another dtype


def _read_by(facts, args, tensors):
    """Return the arguments whose numbers decide a shape or a Python value.

    For an indexing operation, these are the boolean masks among the ids.
    """
    if facts.name in ("index", "_unsafe_index"):
        return [t for t in tensors_in(args[1:]) if t.dtype in MASKS]
    if facts.name in BY_SIZES:
        return tensors_in(args[1:])
    return tensors if facts.by_numbers else []


def _changed_by(result, keys, written):
    """Return the new results, and the other tensors that were written to.

    `keys` are the storages of the arguments.
    """
    outs = tensors_in((result,))
    if not written:
        outs = [o for o in outs if o.untyped_storage()._cdata not in keys]
        return outs, []
    return outs, [t for t in written if all(t is not o for o in outs)]


Memory = tuple[int, int]  # the addresses where the memory starts and ends


def _memory_of(tensor: Tensor) -> Memory | None:
    return _memory_in(tensor.untyped_storage())


def _memory_in(storage: torch.UntypedStorage) -> Memory | None:
    if storage.device.type != "cpu":
        return None
    start = storage.data_ptr()
    return (start, start + storage.nbytes()) if storage.nbytes() else None


def _overlap(one: Memory | None, other: Memory | None) -> bool:
    if one is None or other is None:
        return False
    return one[0] < other[1] and other[0] < one[1]


def _is_read_late(written: list[Tensor], tensors: list[Tensor]) -> bool:
    """Return whether an operation may read memory after writing to it.

    torch reads a place before writing it only if both views are the same, and
    have no place twice.
    """
    return any(map(_has_a_place_twice, written)) or any(
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and _layout(one) != _layout(other)
        and _share_places(one, other)
        for one in written
        for other in tensors
        if one is not other
    )


def _has_a_place_twice(tensor: Tensor) -> bool:
    """Return whether a view of memory shows one place more than once."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    axes = sorted(_layout(tensor)[2], key=lambda axis: axis[1])
    steps = [step for _, step in axes]
    # the last place that each axis reaches together with those before it
    *before, last = accumulate(
        ((count - 1) * step for count, step in axes), initial=0
    )
    if all(step > place for step, place in zip(steps, before, strict=True)):
        return False
    places = torch.arange(last + 1)
    shown = places.as_strided(tensor.size(), tensor.stride())
    return shown.unique().numel() < tensor.numel()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for the same view of one storage."""
    both = zip(tensor.size(), tensor.stride(), strict=True)
    axes = [(count, step) for count, step in both if count > 1]
    return tensor.dtype, tensor.storage_offset(), axes


def _share_places(one: Tensor, other: Tensor) -> bool:
    """Return whether two views of one storage have a place in common."""
    if not one.numel() or not other.numel():
        return False
    if one.itemsize != other.itemsize:
        return True
    count = one.untyped_storage().nbytes() // one.itemsize
    places = torch.zeros(count, dtype=torch.bool)
    seen, read = (
        places.as_strided(t.size(), t.stride(), t.storage_offset())
        for t in (one, other)
    )
    seen.fill_(True)
    return bool(read.any())


class Shadows(Operations):
    """Carries a code for each number through operations in a `with` block.

    Args:
        parameters: tensors that can have any value, except boolean and
            integer parameters.
        free: further tensors that can have any value.
        routing: whether integers that route a token, and depend only on that
            token, count as known.
        tape: called with each step; None means that steps are not kept. A tape
            with `views` is also called with views. If a tape returns True, the
            step's results depend on no token.
        blind: whether results carry no codes, because the tape only reads
            their numbers.
        answers: the cache of the rules' answers; None means that the rules
            are always asked.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] = (),
        routing: bool = False,
        tape: Callable[[Step], bool | None] | None = None,
        blind: bool = False,
        free: Iterable[Tensor] = (),
        answers: Answers | None = None,
    ):
        super().__init__()
        self.storages = Storages()
        self.notes = Notes()
        self.routing, self.tape, self.blind = routing, tape, blind
        self.replaced = replaced_kernels()
        self.routed = False
        self.path = 0  # a hash of the operations that carried codes
        self.checks = False  # whether to ignore reads of an operation
        self.times_read = 0  # how often operations or printing read numbers
        self.inside: list[Any] = []  # operations being decomposed now
        self.answers = answers
        # operations that ran for the current answer; None: do not cache it
        self.steps: list[Any] | None = None
        self.noted: list[Noted] = []
        self.coming: dict[int, Any] = {}  # codes from ranks, by storage
        self.sent: list[Any] = []  # messages with codes to other ranks
        # addresses of memory that no operation made
        self.outside: dict[int, Memory] = {}
        self.written: list[Tensor] = []  # tensors written in such memory
        for parameter in map(local, parameters):
            for part in parts_of(parameter):
                self.mark(part, FREE)
        for tensor in map(local, free):
            for part in parts_of(tensor):
                self.storages.fill(part, FREE)

    def mark(self, tensor: Tensor, code: int | Tensor) -> None:
        """Set the dependency codes of a tensor's numbers."""
        if isinstance(code, int):
            if code == FREE and isinstance(tensor, nn.Parameter):
                # a mask is not trained; the prover tests later whether the
                # proof depends on it
                code = KNOWN if is_constant(tensor) else FREE
            self.storages.fill(tensor, code)
            return
        codes = lined_up(code.to(tensor.device), tensor.dim())
        self.storages.write(tensor, codes_of(codes))

    def codes(self, tensor: Tensor) -> Tensor:
        """Return the dependency codes of a tensor."""
        return self._shadow(tensor).view(tensor)

    def latest(self, tensor: Tensor) -> int:
        """Return the largest code of a tensor; KNOWN for a new tensor.

        Codes cannot follow sparse tensors, so they count as new.
        """
        parts = tensors_in(parts_of(local(tensor)))
        found = [self.storages.find(part) for part in parts]
        codes = [plain(s.codes).max() for s in found if s and s.codes.numel()]
        return max(map(int, codes), default=KNOWN)

    def _shadow(self, tensor: Tensor) -> Shadow:
        """Return the codes of a tensor's storage; set them if it is new."""
        storage = tensor.untyped_storage()
        coming = self.coming and self.coming.pop(storage._cdata, None)
        if coming:  # another rank sent this storage, and its codes
            out, codes, work = coming
            work.wait()
            self.storages.write(out, codes_of(codes.to(CODES)))
        shadow = self.storages.find_in(storage, tensor)
        if shadow is None:
            free = isinstance(tensor, nn.Parameter) or tensor.requires_grad
            free = free or in_fully_shard()  # FSDP gathers weights into it
            self.mark(tensor, FREE if free else KNOWN)
            self._meet_outside(tensor)
            if not free:
                self._record(OUTSIDE, [tensor], None)
            shadow = self.storages.find(tensor)
            assert shadow is not None
        return shadow

    def _meet_outside(self, tensor: Tensor) -> None:
        """Record the address of memory that another tensor may share."""
        storage = tensor.untyped_storage()
        memory = _memory_in(storage)
        if memory is None:
            return
        self.outside[storage._cdata] = memory
        shared = [_memory_of(tensor) for tensor in self.written]
        if not storage.resizable():  # torch did not allocate the memory
            shared += [
                _memory_in(other)
                for key, other in self.storages.computed()
                if key not in self.outside
            ]
        if any(_overlap(other, memory) for other in shared):
            self.mark(tensor, LONGEST)

    def _write_outside(self, tensors: list[Tensor]) -> None:
        """Let other tensors in the same memory depend on every token."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self.outside or not self.storages.lives(key):
                continue
            self.written.append(tensor)  # keeps its address from being reused
            for other, memory in self.outside.items():
                same = _overlap(_memory_of(tensor), memory)
                if other != key and same and self.storages.lives(other):
                    self.storages.refill(other, LONGEST)

    # --- Operations ---------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and set the dependency codes of its results."""
        kwargs = kwargs or {}
        if is_collective(func):
            return carry(self, func, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self._higher_order(func, args, kwargs)
        facts = facts_of(func)
        if self._is_replaced(func):
            facts = facts_of_replaced(func)
        name = facts.name
        if facts.view and not tensors_in(args, lost=True):
            return self._view(func, name, args, kwargs)
        if facts.composite and (name not in RULES or func in DECOMPOSED):
            if name in BY_SIZES:
                self.read(name, tensors_in(args[1:]))
            elif func in PACKED:
                self.read(name, [args[1]])
            # call the model's own kernel, because func.decompose may import
            # sympy, which takes half a second
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        for out in tensors_in([kwargs["out"]]) if "out" in kwargs else ():
            if self.storages.is_new(out):
                self.mark(out, LONGEST)  # `out` may still hold anything
        if self.blind:
            return self._watch(func, facts, args, kwargs)
        return self._carry(func, facts, args, kwargs)

    def _is_replaced(self, func):
        """Return whether a library in Python replaces torch's kernel."""
        return bool(self.replaced) and func.name() in self.replaced

    def _view(self, func, name, args, kwargs):
        """Run a view, which shares the dependency codes of its storage."""
        self._meet(tensors_in(args))
        result = func(*args, **kwargs)
        if func is VIEW_AS:  # the bits of NaN are a number
            self._note("nans", 0, name)
            if result.dtype.to_real() != args[0].dtype.to_real():
                self._forget_signs(args[0])
        if getattr(self.tape, "views", False):
            self._record(name, tensors_in((result,)), None)
        return result

    def _forget_signs(self, tensor):
        """Let each known 0 among numbers that depend on tokens have any sign.

        A product with a mask may have made it.
        """
        shadow = self._shadow(tensor)
        floating = tensor.is_floating_point() or tensor.is_complex()
        if floating and shadow.low == KNOWN and shadow.top > FREE:
            codes = shadow.view(tensor)
            zero = (codes == KNOWN) & (tensor == 0)
            if bool(zero.any()):
                self.mark(tensor, codes.masked_fill(zero, SIGN))

    def _meet(self, tensors):
        """Give new storages their codes; return the keys of all storages."""
        keys = set()
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            keys.add(key)
            if not self.storages.has(key):
                self._shadow(tensor)
        return keys

    def _watch(self, func, facts, args, kwargs):
        """Run an operation; pass its results to the tape, without codes."""
        keys = self._meet(tensors_in((*args, *kwargs.values())))
        result = func(*args, **kwargs)
        if facts.reshapes:
            return result
        written = facts.written and facts.written_by(args, kwargs)
        outs, others = _changed_by(result, keys, written)
        for out in outs:
            self.storages.meet(out)  # so that it is not taken for OUTSIDE
        if outs or others:
            self._record(facts.name, outs + others, None)
        return result

    def _carry(self, func, facts, args, kwargs):
        tensors: list[Tensor] = []
        lost: list[Tensor] = []
        sorted_tensors((*args, *kwargs.values()), tensors, lost)
        shadows, keys, top, low = {}, set(), KNOWN, LONGEST
        for tensor in tensors:
            shadow = self._shadow(tensor)
            shadows[id(tensor)] = tensor, shadow
            keys.add(tensor.untyped_storage()._cdata)
            top, low = max(top, shadow.top), min(low, shadow.low)
        name = facts.name
        written = facts.written and facts.written_by(args, kwargs)
        codes, before = {}, {}
        if written and top > KNOWN:
            codes, before = self._kept_of(written, tensors)
        own = func.namespace in TORCHS_OWN
        seed = None if own else torch.get_rng_state()
        result = self._result(func, name, args, kwargs, tensors, top)
        if facts.reshapes:
            return result  # the call wrote no numbers, only strides
        if top > KNOWN and (read := _read_by(facts, args, tensors)):
            self.read(name, read)
        outs, others = _changed_by(result, keys, written)
        if lost or tensors_in((result,), lost=True):  # sparse tensors
            return self._lose(name, top, outs + others, result)
        if not (outs or others):
            return result
        given = Given(func, args, kwargs, shadows, codes, before, outs)
        given.outs, given.hides = outs or others, top >= LOWERED + KNOWN
        given.special = (
            given.hides or low == KNOWN or _any_special(args, kwargs)
        )
        if written and top > KNOWN and _is_read_late(written, tensors):
            call, self.steps = self._call(given), None
            codes = self._of_all(call, f"{name} (of views that overlap)")
            for out, most in zip(given.outs, codes, strict=True):
                self.storages.write(out, codes_of(most))
        else:
            call = self._find(given, facts, top)
        if others and outs:  # written to, but not returned
            call = self._call(given)
            most = call.everything() if top > KNOWN else full(KNOWN, 0)
            lowered = as_lowered(most)
            for other in others:
                self.mark(other, as_dtype(lowered, other.dtype))
        if seed is not None and not seed.equal(torch.get_rng_state()):
            for out in outs + others:  # a user's operation drew random numbers
                drawn = self.codes(out).clamp(min=FREE)
                self.storages.write(out, codes_of(drawn))
        if top > FREE and written:
            self._write_outside(written)
            if any(map(self.storages.is_shared, written)):
                self.notes.left[find_place(name)] = name
        if self.tape is not None and not self.inside:
            call = call or self._call(given)
            self._record(name, outs + others, call)
        return result

    def _kept_of(self, written, tensors):
        """Return, by tensor id, the codes and the values before a write."""
        keys = {t.untyped_storage()._cdata for t in written}
        codes, before = {}, {}
        for t in tensors:
            if t.untyped_storage()._cdata in keys:
                before[id(t)] = t.clone()
                codes[id(t)] = self.codes(t).clone()
        return codes, before

    def _result(self, func, name, args, kwargs, tensors, top):
        """Run an operation; if it raises, note that it has read numbers."""
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, TypeError):
            raise  # these do not depend on the numbers
        except Exception:
            if top > FREE:  # the model may catch the exception
                self.read(name, tensors)
            raise

    def _lose(self, name, top, changed, result):
        """Let the results of sparse tensors depend on every token."""
        if top > FREE:
            self.notes.left[find_place(name)] = f"{name} (sparse)"
        self.steps = None
        for out in changed:
            self.mark(out, LONGEST)
        return result

    def _call(self, given):
        """Return an operation as a Call for its rule."""
        codes = {key: given.codes_of(key) for key in given.shadows}
        call = Call(
            given.func,
            given.args,
            given.kwargs,
            codes,
            given.before,
            given.outs,
            self._note,
        )
        call.hides, call.special = given.hides, given.special
        call.routing = self.routing
        return call

    def _find(self, given, facts, top):
        """Find the dependency codes of the results, and set them.

        Return the call if a rule was asked, otherwise None.

        Args:
            given: the operation.
            facts: the facts of the operation.
            top: an upper bound of the arguments' codes.
        """
        name = facts.name
        if name in UNSET or (top == KNOWN and not facts.random):
            code = LONGEST if name in UNSET else KNOWN
            for out in given.outs:
                codes = full(code, out.dim(), out.device)
                self.storages.write(out, Codes(codes, code, code))
            return None
        question, answer, call = None, None, None
        if self.answers is not None and not (self.inside or self.routing):
            question = given.question()
            answer = self.answers.get(question, NEW)
        if answer is NEW or answer is None:
            call = self._call(given)
            answer = self._first_answer(
                call, name, question if answer is NEW else None
            )
        else:
            for func in answer.steps:
                self.path = hash((self.path, func))
            for kind, number, of in answer.notes:
                self._note(kind, number, of)
        for out, codes in zip(given.outs, answer.codes, strict=True):
            self.storages.write(out, codes)
        return call

    def _first_answer(self, call, name, question):
        """Ask a rule; cache its answer if it read no number that may vary."""
        if question is not None:
            self.steps, self.noted = [], []
        codes = self._answer(call, name)
        made = {id(c): Codes(c, *bounds_of(c)) for c in codes}
        found = [made[id(c)] for c in codes]
        steps, self.steps = self.steps, None
        if question is None or steps is None:
            answer = Answer(found)
        else:
            answer = Answer(found, tuple(steps), tuple(self.noted))
        if question is not None and self.answers is not None:
            keep(self.answers, question, None if steps is None else answer)
        return answer

    def _answer(self, call, name):
        """Return the dependency codes of the results.

        If the answer may be cached, the rule is first asked without entries
        that may vary.
        """
        path = self.path = hash((self.path, call.func))
        if self.steps is not None:
            self.steps.append(call.func)
            with suppress(Exception):
                found = self._fitting(Unread(call, self._note), name)
                if found is not None:
                    return found
            self.path, self.steps = path, None
        try:
            fitting = self._fitting(call, name)
        except Exception as error:
            fitting = None
            name = f"{name} ({type(error).__name__}: {error})"
        if fitting is None:
            return self._of_all(call, name)
        if self.routing:
            self._take_routing(call, fitting)
        return fitting

    def _of_all(self, call, name):
        """Let the results of an unknown operation depend on all arguments.

        They may be minus infinity.
        """
        most = call.everything()
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            most = most.clamp(min=FREE)
        if int(most) > FREE:
            self.notes.unknown.setdefault(find_place(name), name)
        most = as_lowered(most)
        return [as_dtype(lined_up(most, o.dim()), o.dtype) for o in call.outs]

    def _fitting(self, call, name):
        """Return dependency codes from a rule or decomposition, or None."""
        func, outs = call.func, call.outs
        if self._is_replaced(func) or call.is_scaled:
            return None
        if call.special and call.makes_nan_finite:
            call.note("nans", 0)
        found, rule = None, RULES.get(name)
        if rule is not None:
            found = rule(call)
        elif torch.Tag.pointwise in func.tags and func.namespace in TORCHS_OWN:
            found = pointwise(call)
        if found is None:
            found, rule = self._decomposed(call.whole), None
        fitting = self._fitted(found, outs)
        if fitting is None or rule is None:
            return fitting
        least = call.not_consulted()
        if least > KNOWN:
            fitting = [f.where(f >= least, least) for f in fitting]
        if name not in PLACED and call.is_low():
            fitting = [
                as_lowered(f) if o.dtype != torch.bool else f
                for f, o in zip(fitting, outs, strict=True)
            ]
        return fitting

    def _fitted(self, found, outs):
        """Return dependency codes that broadcast to the results, or None."""
        if found is None:
            return None
        found = found if isinstance(found, list) else [found] * len(outs)
        fitting = []
        for codes, out in zip(found, outs, strict=False):
            if codes.dim() > out.dim():
                codes = codes.reshape(codes.shape[codes.dim() - out.dim() :])
            codes = as_dtype(lined_up(codes, out.dim()).to(CODES), out.dtype)
            codes.expand(out.shape)  # raises if the codes do not fit
            fitting.append(codes)
        return fitting if len(fitting) == len(outs) else None

    def _take_routing(self, call, fitting):
        for index, routed in enumerate(integers_of_routing(call)):
            if routed and int(fitting[index].max()) > FREE:
                out = call.outs[index]
                fitting[index] = full(KNOWN, out.dim(), out.device)
                self._note("routed", 0, call.name)

    def _decomposed(self, call):
        """Return codes by a formula or torch's decomposition, or None.

        An in-place operation is decomposed like the variant that returns a new
        tensor.
        """
        func, (args, kwargs) = call.func, call.positional
        parts = formula = FORMULAS.get(call.name)
        if formula is not None:
            args, kwargs = (call.args,), {}
        elif torch.Tag.nondeterministic_seeded in func.tags:
            return None  # the decomposition would draw other random numbers
        elif not func._schema.is_mutable:
            own = func.namespace in TORCHS_OWN
            parts = decomposition_table.get(func) if own else None
        elif func.namespace in TORCHS_OWN and len(call.results) < 2:
            parts = getattr(torch.ops.aten, call.name, None)
            args, kwargs = call.before_it_wrote(self.mark)
        if parts is None or func in self.inside:
            return None  # no variant without writes, or `func` contains itself
        self.inside.append(func)
        try:
            with self:
                results = tensors_in((parts(*args, **kwargs),))
        finally:
            self.inside.pop()
        found = [self.codes(r) for r in results]
        shapes = [r.shape for r in results]
        if formula is not None and found:  # it gives only the first result
            found += [found[0].amax() for _ in call.outs[len(found) :]]
        fits = shapes == [o.shape for o in call.outs[: len(shapes)]]
        return found if fits and len(found) == len(call.outs) else None

    def _higher_order(self, func, args, kwargs):
        """Carry codes into a higher-order operator, if that is possible."""
        name = getattr(func, "__name__", str(func))
        self.steps = None
        if name == "flex_attention":  # follow its eager formula
            from torch._higher_order_ops.flex_attention import math_attention

            # the compiled kernel reads lists, which codes cannot follow
            self.read(name, lists_of(args[4]))
            with self:
                return math_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        # its functions may read and write tensors that are not arguments
        for out in tensors_in(any_leaves(result)):
            self.mark(out, LONGEST)
        if any(isinstance(a, FunctionType) for a in any_leaves(args)):
            self.notes.left[find_place(name)] = name
        self.notes.unknown.setdefault(find_place(name), name)
        return result

    def copied(self, source: Tensor, made: Tensor) -> None:
        """Give a deep copy the dependency codes of the original tensor."""
        self._shadow(source)
        self.storages.copy(source, made)
        self._record("clone", [made], None)

    # --- Notes --------------------------------------------------------------

    def _note(self, kind: str, number: float, name: str = "mask") -> None:
        place, notes = find_place(name), getattr(self.notes, kind)
        notes[place] = max(number, notes.get(place, number))
        self.noted.append((kind, number, name))
        self.routed |= kind == "routed"

    def read(
        self, name: str, tensors: list[Tensor], left: bool = False
    ) -> None:
        """Note that Python code reads numbers, unless they are known.

        `left`: whether the numbers leave torch and may return changed.
        """
        if self.checks:
            return
        most = KNOWN
        self.times_read += 1
        for tensor in tensors:
            if tensor.numel():
                most = max(most, int(plain(self.codes(tensor)).max()))
            if left:  # an array may read numbers that torch writes later
                self.storages.share(tensor)
        if most == KNOWN:
            return
        self.steps = None  # the answer depends on numbers: do not cache it
        place = find_place(name)
        if left and most > FREE:
            self.notes.left[place] = name
        known = self.notes.reads.get(place, KNOWN)
        self.notes.reads[place] = max(known, most)

    def _record(self, name, outs, call) -> None:
        if self.tape is None or self.inside:
            return
        if self.blind:  # an earlier run has found the place
            self.tape(Step(name, Place("", 0, name), outs, [], None))
            return
        codes = [self.storages.codes(o).clone() for o in outs]
        step = Step(name, find_place(name), outs, codes, call, self.routed)
        self.routed = False
        if self.tape(step):
            for out in outs:
                self.mark(out, FREE)
