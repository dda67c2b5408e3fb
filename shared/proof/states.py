"""Find the states that calls leave in a model.

The model is called as in training and serving: several times, in each mode,
with targets, masks and other arguments. If each call changes a tensor, or if
tokens decide the change, the proof lets it have any value. If calls leave any
other difference, the model is also proved in the state that they leave.
"""

import dis
import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..running.context import (
    PYTHON,
    drawn_outside_torch,
    only_type_checkers_draw,
)
from ..running.errors import ModelRaised
from ..running.model.kept_state import (
    Drawn,
    KeptState,
    Values,
    changed,
    values_of,
)
from ..running.operations import calls_seen_by, tensors_in
from ..running.ranks import current, local, on_any
from ..running.subject import Subject
from ..running.variant import Copy, Variant
from ..running.ways import (
    AUTOCAST,
    CAUSALITY,
    EVAL,
    INFERENCE,
    TRAIN,
    TRAIN_AUTOCAST,
    TRAIN_WITHOUT_GRADIENTS,
    WITH_GRADIENTS,
    Case,
    cases_of,
    to_be_tried,
)
from .codes import is_constant
from .engine import ModelRun, Tokens, left_by_call
from .sources import Source, Sources

SHORT_TOKENS = 5  # tokens of the text in each call
MODES = {WITH_GRADIENTS, TRAIN_WITHOUT_GRADIENTS, INFERENCE}
MODES |= {AUTOCAST, TRAIN_AUTOCAST}
SYSTEM_RANDOM = random.SystemRandom.__name__
TWICE = 2  # how often a round repeats each call, unless the model is heavy


@dataclass(frozen=True)
class States:
    """The changes that calls make to a model.

    Attributes:
        moving: names of tensors that can have any value after some calls.
        fixed: names of other values that calls change; a proof assumes that
            they stay as they are.
        unread: names and kinds of objects that cannot be read or restored.
        draws: generators outside torch that calls use, each with whether the
            call was in train mode.
        derived: by name, codes of tensors that calls compute from weights.
        catching: functions that catch exceptions.
        lost: why calls could not be inspected, or "".
        worn: the state after calls; None if the model is as built.
        calls: the number of calls in train mode.
    """

    moving: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    draws: tuple[tuple[Source, bool], ...] = ()
    derived: dict[str, Tensor] = field(default_factory=dict)
    catching: tuple[str, ...] = ()
    lost: str = ""
    worn: KeptState | None = None
    calls: int = 0


def find_states(subject: Subject, copy: Copy) -> States:
    """Call a model as its users do, and return the changes."""
    assert copy.built is not None
    rounds = _Rounds(subject, copy)
    at_first, after = values_of(copy.model), rounds.run(0)
    if not on_any(bool(changed(at_first, after))):
        copy.built.put_back(always=True)
        left, derived = dict[str, None](), dict[str, Tensor]()
        # calls that left the same objects fill none but these
        held = copy.built.tensors.values()
        if on_any(not all(isinstance(t, nn.Parameter) for t in held)):
            left, derived = rounds.left_by_calls()
        unread = rounds.unread()
        found = replace(rounds.found(), moving=tuple(left), unread=unread)
        return replace(found, derived=derived)
    later = rounds.run(1)
    worn = KeptState(copy.model)
    count = rounds.training
    copy.built.put_back(always=True)
    other = rounds.run(2)
    copy.built.put_back(always=True)
    moved = dict.fromkeys([*changed(after, later), *changed(after, other)])
    drawn = [n for n in moved if isinstance(_value(n, later, after), Drawn)]
    rounds.draws.update(dict.fromkeys(product(drawn, (False, True))))
    rest = [n for n in moved if n not in drawn]
    tensors = [n for n in rest if isinstance(_value(n, later, after), Tensor)]
    sizes = [n for n in tensors if _changes_its_shape(n, after, later, other)]
    fixed = [n for n in rest if n not in tensors]
    fixed += [f"the shape of {name}" for name in sizes]
    same = not on_any(bool({*changed(at_first, later)} - {*drawn}))
    left, derived = rounds.left_by_calls()
    moving = dict.fromkeys(tensors) | left
    unread = rounds.unread(worn)
    return replace(
        rounds.found(),
        moving=tuple(moving),
        fixed=_in_short(fixed),
        unread=unread,
        derived={n: derived[n] for n in derived if n not in moving},
        worn=None if same else worn,
        calls=count,
    )


def _value(name: str, *found: Values) -> Any:
    return next((values[name] for values in found if name in values), None)


def _changes_its_shape(name: str, *found: Values) -> bool:
    shapes = {getattr(values.get(name), "shape", None) for values in found}
    return len(shapes) > 1


def _in_short(names: list[str]) -> tuple[str, ...]:
    """Return names, with only one name for all items of a list or dict."""
    wholes = [name.partition("[")[0] for name in names]
    items = Counter(w for w, n in zip(wholes, names, strict=True) if w != n)
    return (
        *dict.fromkeys(
            whole if items[whole] > 1 else name
            for whole, name in zip(wholes, names, strict=True)
        ),
    )


class _Rounds:
    """Calls a model in rounds, and records its random draws."""

    def __init__(self, subject: Subject, copy: Copy):
        self.subject, self.copy = subject, copy
        self.draws: dict[tuple[Source, bool], None] = {}
        self.sources, self.looking = Sources(), True
        self.training = 0  # number of calls so far in train mode
        self.generator = subject.generator()

    def found(self) -> States:
        """Return what the calls have shown so far, except changed values."""
        catching = tuple(self.sources.catching)
        draws, lost = tuple(self.draws), self.sources.lost
        return States(
            draws=draws, catching=catching, lost=lost, calls=self.training
        )

    def unread(self, *others: KeptState) -> tuple[tuple[str, str], ...]:
        """Return objects whose state cannot be read, now or in `others`."""
        states = (self.copy.built, *others)
        found = [s.unread.items() for s in states if s is not None]
        every = dict.fromkeys(item for items in found for item in items)
        for name, kind in every:
            if kind == SYSTEM_RANDOM:  # seeding does not repeat these draws
                self.draws |= dict.fromkeys([(name, False), (name, True)])
        return tuple(item for item in every if item[1] != SYSTEM_RANDOM)

    def run(self, number: int) -> Values:
        """Make all calls in round `number`, and return the model's values."""
        times = 1 if self.subject.heavy else TWICE
        for turn in range(times):
            self.looking = number == turn == 0
            for case, time in self._calls():
                with suppress(ModelRaised):
                    self._call(case, time)
                self.training += case.training
        # one more, so that two rounds differ where each call turns a switch
        case, time = next(self._calls())
        with suppress(ModelRaised):
            self._call(case, time)
        if not self.subject.heavy and isinstance(self.copy.model, nn.Module):
            self._step_and_save(self.copy.model)
        return values_of(self.copy.model)

    def _step_and_save(self, model: nn.Module) -> None:
        """Run what training runs between calls: hooks, saving and loading.

        Gradients are kept as they were, and no weight is updated.
        """
        if current() is not None:
            return  # the ranks would have to exchange gradients
        kept = [(weight, weight.grad) for weight in model.parameters()]
        tokens, _ = self._texts(TRAIN, self.subject.lengths.fit(SHORT_TOKENS))
        run = Variant(self.subject, self.copy, TRAIN)
        for _ in range(2):  # an even number, so that a switch stays turned
            with suppress(Exception):
                answer = run.answer(tokens, grad=True, go_on=True)
                found = [t for t in tensors_in((answer,)) if t.requires_grad]
                torch.stack([t.sum() for t in found]).sum().backward()
            with suppress(Exception, SystemExit):
                model.zero_grad()
            with suppress(Exception, SystemExit):
                model.load_state_dict(model.state_dict())
        for weight, grad in kept:
            weight.grad = grad

    def left_by_calls(self) -> tuple[dict[str, None], dict[str, Tensor]]:
        """Return the tensors that calls fill from tokens, weights or draws.

        Comparing values may miss such a tensor, for example if only a rare id
        sets a flag. Tensors computed only from weights and draws come with
        their codes.
        """
        moving, derived = dict[str, None](), dict[str, Tensor]()
        for case, time in dict.fromkeys(self._calls()):
            tokens, targets = self._texts(case, time)
            run = ModelRun(
                Variant(self.subject, self.copy, case), self.copy.built
            )
            with suppress(ModelRaised), self.subject.budget.overtime():
                found = left_by_call(run, tokens, targets)
                for name, codes in found.items():
                    known = derived.get(name, codes)
                    if codes is None or known is None:
                        moving[name] = None
                    elif known.shape == codes.shape:
                        derived[name] = codes.maximum(known)
                    else:
                        moving[name] = None
        return moving, {n: derived[n] for n in derived if n not in moving}

    def _calls(self) -> Iterator[tuple[Case, int]]:
        """Yield the case and the text length of each call."""
        subject = self.subject
        short = subject.lengths.fit(SHORT_TOKENS)
        cases = [c for c in to_be_tried(subject.caller) if not c.losses]
        if subject.heavy:
            cases = [c for c in cases if c.targets]
        masks = [c for c in cases if c.visible and not c.training]
        cases += [_in_training(case) for case in masks]
        calls = [(case, short, 2) for case in (EVAL, TRAIN, *cases)]
        if not subject.heavy:
            longest = subject.lengths.fit(subject.block_size)
            calls += [(case, longest, 2) for case in (TRAIN, EVAL)]
            calls += [(TRAIN, short, 1), (EVAL, subject.lengths.fit(1), 1)]
            modes = [c for c in cases_of(CAUSALITY, subject) if c in MODES]
            calls += [(EVAL, short, 3), *((case, short, 2) for case in modes)]
        calls += [(EVAL, short, 1), (TRAIN, short, 2)]
        yield from ((replace(c, rows=rows), time) for c, time, rows in calls)

    def _call(self, case: Case, time: int) -> None:
        subject = self.subject
        tokens, targets = self._texts(case, time)
        run = Variant(subject, self.copy, case)
        seed = subject.seed + self.training
        call: Callable[[], Any] = partial(
            run.answer, tokens, seed=seed, targets=targets, go_on=True
        )
        watched = (
            partial(self._looked_at, case, call) if self.looking else call
        )
        for name in drawn_outside_torch(seed, watched):
            # Only one profiler can run, and only_type_checkers_draw sets its
            # own. So it gets `call`, which Sources does not watch.
            if name != PYTHON or not only_type_checkers_draw(call):
                self.draws[name, case.training] = None

    def _looked_at(self, case: Case, call: Callable[[], Any]) -> None:
        self.sources.drawn.clear()
        look = self.sources.look
        with calls_seen_by(look):
            try:
                call()
            finally:
                if sys.getprofile() is not look:
                    self.sources.lose()
        for name in self.sources.drawn:
            self.draws[name, case.training] = None

    def _texts(self, case: Case, time: int) -> tuple[Tokens, Tokens | None]:
        """Return the tokens of a case, and targets if the case has them."""
        subject = self.subject
        rows = subject.fit_rows(case.rows)
        tokens, targets = (
            subject.draw(rows, time, self.generator).to(subject.device)
            for _ in range(2)
        )
        return tokens, targets if case.targets else None


def _in_training(case: Case) -> Case:
    how = f"in train mode {case.how}"
    return replace(case, how=how, training=True, grad=True)


def saved_constants(model: Any) -> dict[str, list[tuple[str, Tensor]]]:
    """Return tensors that a checkpoint sets but training does not, by name.

    They are saved buffers, and parameters that hold masks or whole numbers. A
    name is the last part of a full name, so equal layers share names.
    """
    found: dict[str, list[tuple[str, Tensor]]] = {}
    if not isinstance(model, nn.Module):
        return found
    with suppress(Exception):
        left_out = {
            f"{name}.{buffer}".lstrip(".")
            for name, module in model.named_modules()
            for buffer in module._non_persistent_buffers_set
        }
        buffers = [b for b in model.named_buffers() if b[0] not in left_out]
        whole = [
            (name, weight)
            for name, weight in model.named_parameters()
            if is_constant(local(weight))
        ]
        for name, tensor in (*buffers, *whole):
            last = name.rpartition(".")[2]
            found.setdefault(last, []).append((name, tensor))
    return found


def extra_states(model: Any) -> list[str]:
    """Return the modules that load more than tensors from a checkpoint.

    They have an extra state, or code that sets attributes while it loads.
    Torch's modules are left out, because they keep only quantisation scales.
    """
    if not isinstance(model, nn.Module):
        return []
    return [
        name
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
        and (
            type(module).set_extra_state is not nn.Module.set_extra_state
            or any(_sets_attributes(*each) for each in _loaders(module))
        )
    ]


LOADERS = "load_state_dict", "_load_from_state_dict"
LOAD_HOOKS = "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"


def _loaders(module: nn.Module) -> Iterator[tuple[Any, bool]]:
    """Yield the author's functions that run when a checkpoint loads.

    The second value says whether the first argument is the module.
    """
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            yield from (
                (vars(kind)[n], True) for n in LOADERS if n in vars(kind)
            )
    for name in LOAD_HOOKS:
        for given in getattr(module, name, {}).values():
            first = getattr(given, "with_module", "post" in name)
            hook = getattr(given, "hook", given)  # torch wraps it
            bound = isinstance(hook, MethodType)
            yield getattr(hook, "func", hook), first or bound


def _sets_attributes(function: Any, takes_module: bool) -> bool:
    """Return whether a function sets attributes, or uses its module's.

    A function that only renames the keys of a checkpoint does neither.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    modules = {*code.co_freevars, *code.co_varnames[:takes_module]}
    steps = [*dis.get_instructions(code)]
    return any(
        step.opname == "STORE_ATTR" or "setattr" in str(step.argval)
        for step in steps
    ) or any(
        step.opname.startswith("LOAD_")
        and step.argval in modules
        and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
        for step, after in pairwise(steps)
    )
