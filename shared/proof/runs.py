"""Make the runs of a proof: copies of the model, their states, and texts."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from ..running.model.kept_state import KeptState
from ..running.model.sizes import special_ids
from ..running.subject import Subject
from ..running.variant import Copy, Variant, copy_for
from ..running.ways import EVAL, Case, accepted, lengths_of_proof
from .chains import Chains
from .codes import LONGEST
from .engine import POSITIONS, SHIFTED, ModelRun, Order, Tokens
from .states import States, find_states

Kind = tuple[torch.dtype | None, bool]  # a copy's dtype, whether it is frozen


@dataclass(frozen=True)
class Text:
    """The input of a call: tokens, and targets if they are given."""

    tokens: Tokens
    targets: Tokens | None

    @property
    def time(self) -> int:
        """Return the number of tokens."""
        return self.tokens.size(1)


@dataclass(frozen=True)
class Runs:
    """The runs of one proof.

    Call `runs_of` to make them.

    Attributes:
        subject: the model.
        orders: orders of the tokens; each case is proved in every order.
        loss_order: the order for a case that follows a loss, not scores.
        lengths: lengths of the texts.
        states: the changes that calls make to the model.
        special: ids that the model's code may treat differently.
        chains: orders for declared visibility, or None.
        after: in words, the calls that came before; "" if there were none.
        copies: copies of the model, by `Kind`.
    """

    subject: Subject
    orders: tuple[Order, ...] = (POSITIONS,)
    loss_order: Order = SHIFTED  # of the two orders for losses, the stricter
    lengths: tuple[int, ...] = ()
    states: States = field(default_factory=States)
    special: tuple[int, ...] = ()
    chains: Chains | None = None
    after: str = ""
    copies: dict[Kind, Copy] = field(default_factory=dict)

    def of(self, case: Case) -> ModelRun:
        """Return the model as a case runs it, ready for `follow`."""
        copy, states = self._copy_for(case), self.states
        if self.after:
            copy = replace(copy, built=states.worn)
        variant = Variant(self.subject, copy, case)
        return ModelRun(
            variant, copy.built, states.moving, derived=states.derived
        )

    def orders_of(self, case: Case, tokens: Tokens) -> tuple[Order, ...]:
        """Return the orders (engine.py) in which a text is followed."""
        if case.losses:
            return (self.loss_order,)
        return (
            self.orders if self.chains is None else self.chains.orders(tokens)
        )

    def text(self, case: Case, time: int) -> Text:
        """Return the text of a case, which is the same each time."""
        subject, generator = self.subject, self.subject.generator()
        rows = subject.fit_rows(case.rows)
        tokens = subject.draw(rows, time, generator).to(subject.device)
        if not case.targets:
            return Text(tokens, None)
        targets = subject.draw(rows, time, generator).to(subject.device)
        return Text(tokens, targets)

    def _copy_for(self, case: Case) -> Copy:
        key = case.dtype, case.frozen
        if key not in self.copies:
            built = Case(dtype=case.dtype, frozen=case.frozen)
            copy = copy_for(self.subject, built).copy
            copy.may_fail = copy.rough = False
            if not self.subject.caller.arrays:
                self.subject.builder.put_back_shared()
                copy.built = KeptState(copy.model)
            self.copies[key] = copy
        return self.copies[key]


def runs_of(
    subject: Subject,
    orders: tuple[Order, ...] = (POSITIONS,),
    lengths: Iterable[int] | None = None,
    loss_order: Order = SHIFTED,
) -> Runs:
    """Return the runs of a proof, and find the changes that calls make.

    Args:
        subject: the model.
        orders: orders of the tokens.
        lengths: lengths of the texts; None means the usual lengths.
        loss_order: the order for a case that follows a loss, not scores.
    """
    runs = Runs(subject, orders, loss_order)
    copy = runs.of(EVAL).variant.copy
    if not subject.caller.arrays:
        runs = replace(runs, states=_states_of(subject, copy))
    if lengths is None:
        found = lengths_of_proof(subject, copy.model, LONGEST)
    else:
        found = accepted(subject, lengths)
    special = special_ids(copy.model, subject.vocab_size)
    return replace(runs, lengths=tuple(found), special=tuple(special))


def _states_of(subject: Subject, copy: Copy) -> States:
    """Return the changes that calls make to the model.

    The builder keeps them, except for a `worn` state, which belongs to this
    copy.
    """
    builder = subject.builder
    if builder.states is None:
        found = find_states(subject, copy)
        if found.worn is not None:
            return found
        builder.states = found
    return builder.states
