"""Proofs of a model: a run at each length, in each way it is run."""

from collections.abc import Iterable

import torch
from torch import nn

from ..budget import Budget
from ..copies import changeable, own
from ..errors import ModelRaised, sentence
from ..model.building import KeptState, cast
from ..places import Place, place_of_code
from ..subject import Subject
from ..variant import Copy, Variant
from ..ways import EVAL, TRAIN
from .cases import Case, Run, accepted, plan, usual_lengths
from .engine import POSITIONS, Found, Order, Tokens, control, follow, way
from .notes import Notes
from .proof import Open, Proof

CONTROL = 5  # tokens of the text in which each is changed
FEWER = 3  # of a heavy model
CLEAR = (7, 5, 11)  # lengths that are seldom another size
FOLLOWED = 130  # tokens of the longest text in which a way is followed
FORWARDS = 4  # that one run may take
SHARES = (1 / 2, 1 / 5)  # of the time left, kept for tests; a heavy model's


class Prover:
    """The proofs of one model.

    Args:
        subject: the model.
        budget: says what there is time for.
        orders: of the tokens; one way of running is proved in all of them.
        lengths: of the texts; None: the usual ones.
        rows: of each batch, at least.
    """

    def __init__(
        self,
        subject: Subject,
        budget: Budget,
        orders: tuple[Order, ...] = (POSITIONS,),
        lengths: Iterable[int] | None = None,
        rows: int = 1,
    ):
        self.subject, self.budget, self.orders = subject, budget, orders
        self.rows = rows
        self.main = [Case(one, rows) for one in (EVAL, TRAIN)]
        self.proof = Proof(order=orders[0].name)
        share = SHARES[subject.heavy]
        self.reserve = share * budget.left if budget.limited else 0.0
        self.took: dict[int, float] = {}  # seconds by tokens of a run
        self.cut = False  # whether a way had no time for some length
        self.routing = False
        self.notes = Notes()
        self.raised = ""
        self.names: set[str] = set()  # of operations that carried codes
        self.controlled: set[str] = set()
        self.copies: dict[tuple[torch.dtype | None, bool], Copy] = {}
        if lengths is None:
            model = self._copy(self.main[0]).model
            self.lengths = usual_lengths(subject, model, budget.limited)
        else:
            self.lengths = accepted(subject, lengths)

    def prove(self, others: Iterable[Case] = ()) -> Proof:
        """Return the proof, which stops at what is open first.

        Args:
            others: ways beside eval and train mode, at a few lengths.
        """
        proof, limited = self.proof, self.budget.limited
        if self.subject.caller.arrays:
            model = self._copy(self.main[0]).model
            proof.leave_torch(place_of_code(model))
            return proof
        ways = plan(self.subject, self.main, others, self.lengths, limited)
        done: dict[Case, list[int]] = {case: [] for case in self.main}
        for case, lengths in ways:
            self.cut = False
            try:
                proved = self._case(case, lengths)
            except Exception as error:  # a fault of the kit costs the proof
                self._add(f"{case.name}: the proof broke: {sentence(error)}")
                proved = None
            if proved is None:
                proof.proved = False
                break
            if case in done:
                done[case] += proved
                proved = done[case]
            if not done[self.main[0]]:
                break  # nothing else is of use
            name = case.way.mode if case in done else case.name
            if proved and name not in proof.modes:
                proof.modes.append(name)
            elif self.cut and not proved and name not in proof.left_out:
                proof.left_out.append(name)
        both = [{*lengths} for lengths in done.values() if lengths]
        proof.lengths = sorted(set.intersection(*both)) if both else []
        if proof.proved and not (done[self.main[0]] and proof.lengths):
            proof.proved = False
            self._add(self.raised or "there was no time for any length")
        proof.left_out = [n for n in proof.left_out if n not in proof.modes]
        proof.rest_on(self.notes, self.subject.is_module)
        return proof

    # --- One way of running --------------------------------------------------

    def _case(self, case: Case, lengths: list[int]) -> list[int] | None:
        """Return the lengths at which it is proved, or None if it is open."""
        try:
            run = self._run(case)
        except Exception:  # no copy, or none in this dtype
            return []
        proved: list[int] = []
        for time in lengths:
            tokens, targets = self._given(case, time)
            if not self._affordable(tokens):
                self.cut = True
                continue
            began = self.budget.spent
            try:
                open_ = self._is_open(run, case, tokens, targets)
                self.took[tokens.numel()] = self.budget.spent - began
            except ModelRaised as error:
                try:
                    run(tokens, targets)
                except ModelRaised:
                    self.raised = str(error)
                    if not proved and time > 1:  # it does not run so
                        break
                    continue
                self._add(f"{case.name}: it cannot be followed ({error})")
                return None
            if open_ is not None:
                self.proof.at = case, time
                self._explain(run, case, time, open_)
                return None
            proved.append(time)
        if not proved or self.names <= self.controlled:
            return proved
        if not self._affordable(tokens.new_zeros(2 * CONTROL, CONTROL)):
            self.proof.uncontrolled()
        else:
            self.controlled |= self.names
            if not self._controlled(run, case):
                return None
        return proved

    def _run(self, case: Case) -> Run:
        copy = self._copy(case)
        variant = Variant(self.subject, self.budget, copy, case.way)
        return Run(variant, copy.built)

    def _copy(self, case: Case) -> Copy:
        key = case.dtype, case.frozen
        if key not in self.copies:
            made = own(self.subject, self.budget)
            if any(key):
                made = changeable(self.subject, self.budget, "")
            if case.dtype is not None:
                cast(made.model, case.dtype)
            if case.frozen:
                made.model.requires_grad_(False)
            if isinstance(made.model, nn.Module):
                made.copy.built = KeptState(made.model)
            self.copies[key] = made.copy
        return self.copies[key]

    def _given(self, case: Case, time: int) -> tuple[Tokens, Tokens | None]:
        """Return tokens, and targets if they are given."""
        subject, generator = self.subject, self.subject.generator()
        rows = subject.fit_rows(case.rows)
        tokens = subject.draw(rows, time, generator).to(subject.device)
        if not case.way.targets:
            return tokens, None
        return tokens, subject.draw(rows, time, generator).to(subject.device)

    def _affordable(self, tokens: Tokens) -> bool:
        if not self.budget.limited:
            return True
        count = tokens.numel()
        reckoned = FORWARDS * self.budget.costs.of(count)
        shorter = (took for n, took in self.took.items() if n <= count)
        seconds = max([reckoned, *shorter])
        return seconds < self.budget.left - self.reserve

    def _is_open(
        self, run: Run, case: Case, tokens: Tokens, targets: Tokens | None
    ) -> tuple[Order, Found] | None:
        """Return what is open at a length, in which order."""
        for order in self.orders:
            found = self._follow(run, case, tokens, targets, order)
            self.names |= found.names
            self.notes.update(found.notes)
            if found.notes.left or found.open(case.shown(tokens.size(1))):
                return order, found
        return None

    def _follow(
        self,
        run: Run,
        case: Case,
        tokens: Tokens,
        targets: Tokens | None,
        order: Order,
    ) -> Found:
        shown = case.shown(tokens.size(1))
        for routing in sorted({self.routing, True}):
            found = follow(
                run, run.parameters, tokens, targets, order, routing
            )
            if not found.open(shown):
                self.routing = routing
                return found
            if not routing:
                strict = found
        return found if self.routing else strict

    def _controlled(self, run: Run, case: Case) -> bool:
        """Change tokens one by one; a wrong rule makes the proof void."""
        size = FEWER if self.subject.heavy else CONTROL
        tokens, targets = self._given(case, self.subject.lengths.fit(size))
        vocab, seed = self.subject.vocab_size, self.subject.seed
        for order in self.orders:
            wrong, parted = control(
                run,
                run.parameters,
                tokens,
                targets,
                vocab,
                order,
                self.routing,
                seed,
            )
            if wrong is not None:
                name, place = wrong
                text = f"numbers change that cannot by the rule of {name}"
                self._add(f"{place}: {text}", place)
                return False
            if parted and not (self.notes.reads or self.notes.routed):
                self._add(f"{parted}: other tokens take another path", parted)
                return False
        return True

    # --- What is open --------------------------------------------------------

    def _add(self, text: str, place: Place | None = None) -> None:
        self.proof.open.append(Open(text, place))

    def _explain(
        self, run: Run, case: Case, time: int, found: tuple[Order, Found]
    ) -> None:
        """Say what is open, and the way of a token that gets through."""
        order, result = found
        for place in result.notes.left:
            self.proof.leave_torch(place)
        if result.notes.left:
            self.proof.at = None  # no length is likelier than another
            return
        for place, number in result.notes.weak.items():
            text = (
                f"{place} hides with {number:,.0f}, which scores can outweigh"
            )
            self._add(text, place)
        for place, name in result.notes.unknown.items():
            self._add(f"{place}: no rule for {name}", place)
        how = f"at length {time} {case.name}"
        late = result.open(case.shown(time))[0]
        try:
            self._follow_way(run, case, time, order)
        except Exception as error:  # it adds to what is known
            self._add(f"the way is not known ({sentence(error)})")
        if self.proof.way is None:
            self._add(f"{how} row {late[0]}, position {late[1]} is open")
            return
        culprit = self.proof.way.culprit
        text = f"{culprit} lets it through: {self.proof.way} ({how})"
        self._add(text, culprit)

    def _follow_way(
        self, run: Run, case: Case, time: int, order: Order
    ) -> None:
        """Follow the way at a length that is no other size, if it shows."""
        clear = [t for t in CLEAR if t > time and t in self.lengths]
        for length in [*clear, time] if time <= FOLLOWED else ():
            tokens, targets = self._given(case, length)
            if not self._affordable(tokens):
                return
            found = self._follow(run, case, tokens, targets, order)
            late = found.open(case.shown(length))
            if late:
                weights = run.parameters
                self.proof.way = way(
                    run, weights, tokens, targets, late[0], order
                )
                return
