"""A model as a proof runs it: its copies, its states, its texts."""

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
from .engine import POSITIONS, SHIFTED, Followed, Order, Tokens
from .states import States, find_states

Kind = tuple[torch.dtype | None, bool]  # of a copy: its dtype, whether frozen


@dataclass(frozen=True)
class Text:
    """The input of a call: tokens, and targets if they are given."""

    tokens: Tokens
    targets: Tokens | None

    @property
    def time(self) -> int:
        """The number of tokens."""
        return self.tokens.size(1)


@dataclass(frozen=True)
class Runs:
    """The runs of one proof.

    `runs_of` makes it.

    Attributes:
        subject: the model.
        orders: of the tokens; each case is proved in every order.
        loss_order: the one order of a case whose loss is followed.
        lengths: of the texts.
        states: what calls change in the model.
        special: ids of its vocabulary that code may treat differently.
        chains: of a declaration of who may see whom; None: the orders.
        after: calls, in words, that made the state; "": it is as built.
        copies: of the model, made once each.
    """

    subject: Subject
    orders: tuple[Order, ...] = (POSITIONS,)
    loss_order: Order = SHIFTED  # the one that allows less
    lengths: tuple[int, ...] = ()
    states: States = field(default_factory=States)
    special: tuple[int, ...] = ()
    chains: Chains | None = None
    after: str = ""
    copies: dict[Kind, Copy] = field(default_factory=dict)

    def of(self, case: Case) -> Followed:
        """Return the model of a case as it is followed."""
        copy, states = self._copy_for(case), self.states
        if self.after:
            copy = replace(copy, built=states.worn)
        variant = Variant(self.subject, copy, case)
        return Followed(
            variant, copy.built, states.moving, derived=states.derived
        )

    def orders_of(self, case: Case, tokens: Tokens) -> tuple[Order, ...]:
        """Return the orders in which a text of a case is followed."""
        if case.losses:
            return (self.loss_order,)
        return (
            self.orders if self.chains is None else self.chains.orders(tokens)
        )

    def text(self, case: Case, time: int) -> Text:
        """Return the text of a case, the same one each time."""
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
    """Return the runs of a proof, with what calls change in the model.

    Args:
        subject: the model.
        orders: of the tokens.
        lengths: of the texts; None: the usual ones.
        loss_order: of a case whose loss is followed.
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
    """Return what calls change; found once where they change nothing.

    A state after calls is that of one copy.
    """
    builder = subject.builder
    if builder.states is None:
        found = find_states(subject, copy)
        if found.worn is not None:
            return found
        builder.states = found
    return builder.states
