"""Proofs of a model: it is followed at each length, in each case."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..running.budget import OutOfTime
from ..running.documents import UNLIKE, Packing, split
from ..running.errors import ModelRaised, sentence
from ..running.losses import added_to, scores_and_loss, shifts_of
from ..running.model.kept_state import KeptState
from ..running.model.sizes import special_ids
from ..running.places import Place, place_of_code
from ..running.ranks import current, on_any
from ..running.rounding import minus
from ..running.subject import Subject
from ..running.tolerances import (
    SPREAD_OF_ANOTHER_PROGRAM,
    SPREAD_OF_ANOTHER_PROGRAM_IN_16_BITS,
)
from ..running.variant import Copy, Variant, copy_for, precise
from ..running.ways import (
    AUTOCAST,
    CAUSALITY,
    EVAL,
    LOSSES,
    TARGETS,
    TRAIN,
    TRAIN_TARGETS,
    Case,
    accepted,
    cases_of,
    followed_cases,
    lengths_of_proof,
    losses_with_arguments,
    plan,
)
from ..validation import dtype_name
from .codes import CODES, FREE, LONGEST
from .culprit import Tape, in_words
from .engine import (
    AS_GIVEN,
    BACKWARDS,
    FALLING_ROWS,
    POSITIONS,
    RISING_ROWS,
    SHIFTED,
    Codes,
    Followed,
    Found,
    Order,
    Recorded,
    Tokens,
    changed,
    control,
    follow,
)
from .proof import Open, Proof
from .shadows import OUTSIDE, Notes
from .sources import UNSEEDED
from .states import States, extra_states, find_states, saved_constants

# --- The prover --------------------------------------------------------------

SEEDED = 5  # tokens of a text that is followed with several seeds
SEEDS = 40  # with which a branch of one call in ten is hardly missed
MORE_ROWS = (2, 5, 8, 16)
UNCONTROLLED = "the control of its rules"
CONTROL = 5  # tokens of the text in which each is changed
LONG_CONTROL = 64  # at most, of a second one
FEWER = 3  # of a heavy model
CLEAR = (7, 5, 11)  # lengths that are seldom another size
FOLLOWED = 130  # tokens of the longest text in which a way is followed
SHARES = (1 / 2, 4 / 5)  # of the time left, for proofs; a heavy model's


class Prover:
    """The proofs of one model.

    Args:
        subject: the model.
        orders: of the tokens; each case is proved in every order.
        lengths: of the texts; None: the usual ones.
        rows: of each batch, at least.
        main: what is proved at each length; None: eval and train mode.
    """

    def __init__(
        self,
        subject: Subject,
        orders: tuple[Order, ...] = (POSITIONS,),
        lengths: Iterable[int] | None = None,
        rows: int = 1,
        main: list[Case] | None = None,
    ):
        self.subject, self.orders = subject, orders
        self.loss_order = SHIFTED  # the one that allows less
        self.main = main or [Case(rows=rows), replace(TRAIN, rows=rows)]
        self.proof = Proof(order=orders[0].name)
        self.cut = False  # whether a case had no time for some length
        self.refused = False  # whether the model took no text after calls
        self.routing = False
        self.notes = Notes()
        self.raised = ""
        self.path = 0  # of the run followed last
        self.controlled: set[int] = set()  # paths
        self.unfollowed: set[int] = (
            set()
        )  # those that were run unfollowed as well
        self.states: States | None = None  # of the model as it is built
        self.after = ""  # calls, in words, which made the state
        self.copies: dict[tuple[torch.dtype | None, bool], Copy] = {}
        self.scores: Tensor | None = None  # of the run followed last
        # of a case: the lengths at which its rules will be compared with
        # changed tokens, and the steps of the runs followed there
        self.sizes: set[int] = set()
        self.steps: dict[tuple[Order, int], Recorded | None] = {}
        if lengths is None:
            model = self.run_of(EVAL).variant.model
            self.lengths = lengths_of_proof(subject, model, LONGEST)
        else:
            self.lengths = accepted(subject, lengths)
        held = self.run_of(EVAL).variant.model
        self.special = special_ids(held, subject.vocab_size)

    def prove(self, others: Iterable[Case] = ()) -> Proof:
        """Return the proof, which stops at what is open first.

        Args:
            others: cases next to eval and train mode, at a few lengths.
        """
        proof, subject = self.proof, self.subject
        subject.proofs[proof.order] = proof
        if subject.caller.arrays:
            model = self.run_of(EVAL).variant.model
            proof.leave_torch(place_of_code(model))
            return proof
        others = [*others]
        model = self.run_of(EVAL).variant
        kinds = [p.dtype for p in model.parameters if p.is_floating_point()]
        proof.dtype = ", ".join(dict.fromkeys(map(dtype_name, kinds)))
        proof.device = str(subject.device or "cpu")
        with subject.budget.part(share=SHARES[subject.heavy]):
            self._prove(plan(subject, self.main, others, self.lengths))
            if proof.holds:
                self._prove_more(others)
        subject.budget.something_tried |= proof.holds
        self._rest_on_state()
        proof.rest_on(self.notes, subject.is_module)
        return proof

    def _prove_more(self, others: list[Case]) -> None:
        """Prove it with other draws, of other batches and after calls."""
        proof = self.proof
        short, states = self.subject.fit(SEEDED), self.states
        try:
            with self.subject.budget.overtime():
                self._rest_on_constants(others)
            proof.states.append("as built")
            more = (*self._seeded(others), *self._crowds())
            proof.holds = self._prove_each((case, short) for case in more)
            done = (*self.main, *others, *(() if self.cut else more))
            proof.rows = sorted({case.rows for case in done})
            if not (proof.holds and states is not None and states.calls):
                return
            after = f"after {states.calls} calls in train mode"
            if states.worn is None or self._prove_after(f" {after}", others):
                proof.states.append(after)
        except Exception as error:  # a fault of the kit costs the proof
            self._add(f"the proof broke: {sentence(error)}")
            proof.holds = False

    def _prove_after(self, calls: str, others: list[Case]) -> bool:
        """Prove it from the state after calls; return whether that is done."""
        proof, self.after = self.proof, calls
        longest = [] if self.subject.heavy else self.lengths[-1:]
        few = [*dict.fromkeys([*self.subject.fit(2, 5), *longest])]
        short = self.subject.fit(SEEDED)
        same = [c for c in others if not (c.copy or c.crowd)]
        cases = [(case, few) for case in self.main]
        cases += [(case, short) for case in same]
        proof.holds = self._prove_each(cases)
        if not proof.holds and proof.at is not None:
            proof.worn = self._worn(proof.at[0])
        if self.cut:
            proof.left_out.append(calls.strip())
        return proof.holds and not (self.cut or self.refused)

    def _prove_each(self, cases: Iterable[tuple[Case, list[int]]]) -> bool:
        """Whether nothing is open in some cases more."""
        self.cut = self.refused = False
        for case, lengths in cases:
            proved = self._case(case, lengths)
            if proved is None:
                return False
            self.refused |= case in self.main and not proved
        return True

    def _worn(self, case: Case) -> Variant:
        """Return the model after calls, for a test of what is open there."""
        run = self.run_of(replace(case, how=f"{case.how}{self.after}"))
        copy = replace(run.variant.copy, built=run.kept)
        subject = replace(self.subject, keeps_state=True)
        return replace(run.variant, subject=subject, copy=copy)

    def _seeded(self, others: list[Case]) -> list[Case]:
        """Return cases in which other random numbers choose the path."""
        draws = self.states.draws if self.states is not None else ()
        generator = self.subject.generator()
        drawing = {mode for name, mode in draws if name not in UNSEEDED}
        if FREE in self.notes.reads.values() and not self.subject.heavy:
            drawing = {False, True}  # torch's draws may choose the path
        modes = [m for m in (False, True) if on_any(m in drawing)]
        drawn = torch.randint(1, 1 << 31, (SEEDS,), generator=generator)
        seeds = drawn.tolist()
        return [
            replace(case, seed=seed)
            for case in (*self.main, *(c for c in others if c.targets))
            if case.training in modes
            for seed in seeds
        ]

    def _crowds(self) -> list[Case]:
        """Return cases of batches of other sizes, where rows are apart."""
        subject = self.subject
        if self.proof.order != "rows" or subject.heavy:
            return []
        counts = dict.fromkeys(subject.fit_rows(n) for n in MORE_ROWS)
        return [
            replace(case, rows=count)
            for count in counts
            if count not in (1, self.main[0].rows)
            for case in self.main
        ]

    def _rest_on_state(self) -> None:
        """Say on what of the model's state the proof rests."""
        proof, states = self.proof, self.states or States()
        for name, kind in states.unread:
            proof.keep_unread(name, kind)
        for name in states.fixed:
            proof.keep(name)
        for name in states.catching:
            proof.keep_catching(name)
        for name in dict.fromkeys(name for name, _ in states.draws):
            proof.depend_on_draws(name)

    def _rest_on_constants(self, others: list[Case]) -> None:
        """Say which saved numbers must stay: with others it is open."""
        run = self.run_of(self.main[0])
        for name in extra_states(run.variant.model):
            self.proof.keep_extra_state(name)
        held = {} if run.kept is None else run.kept.tensors
        moving = {id(held[name]) for name in run.moving if name in held}
        groups = [
            kept
            for alike in saved_constants(run.variant.model).values()
            if (kept := [c for c in alike if id(c[1]) not in moving])
        ]
        cases = [*self._sampled(others)]
        every = [constant for group in groups for constant in group]
        if not every or self._is_free(every, cases):
            return
        needed = [g for g in groups if not self._is_free(g, cases)]
        for group in needed or [every]:
            self.proof.keep_saved(group)

    def _sampled(self, others: list[Case]) -> Iterator[tuple[Case, int]]:
        """Yield each case of the model as it is built, at a short length."""
        heavy, fit = self.subject.heavy, self.subject.lengths.fit
        others = [c for c in others if not (c.copy or c.crowd or heavy)]
        yield from ((case, fit(CONTROL)) for case in (*self.main, *others))
        lengths = self.lengths[-1:] if heavy else reversed(self.lengths)
        yield from product(self.main, lengths)

    def _is_free(
        self,
        constants: list[tuple[str, Tensor]],
        cases: list[tuple[Case, int]],
    ) -> bool:
        """Whether the proof holds for any values of some saved numbers."""
        free = tuple(tensor for _, tensor in constants)
        for case, time in cases:
            run = replace(self.run_of(case), free=free)
            tokens, targets = self.texts(case, time)
            for order in self._orders(run):
                try:
                    found = follow(run, tokens, targets, order, self.routing)
                except ModelRaised:
                    return False
                notes, shown = found.notes, case.shown(*tokens.shape)
                new = notes.reads.keys() - self.notes.reads.keys()
                rests = bool(new or notes.weak or notes.left)
                if on_any(rests or bool(found.open(shown))):
                    return False
        return True

    def _prove(self, cases: Iterable[tuple[Case, list[int]]]) -> None:
        proof = self.proof
        done: dict[Case, list[int]] = {case: [] for case in self.main}
        for case, lengths in cases:
            self.cut = False
            try:
                proved = self._case(case, lengths)
            except Exception as error:  # a fault of the kit costs the proof
                self._add(f"{case.name}: the proof broke: {sentence(error)}")
                proved = None
            if proved is None:
                proof.holds = False
                break
            if case in done:
                done[case] += proved
                proved = done[case]
            if not done[self.main[0]]:
                break  # nothing else is of use
            name = case.mode if case in done else case.name
            if proved and case.words and case.words not in proof.given:
                proof.given.append(case.words)
            if proved and case not in proof.cases:
                proof.cases.append(case)
            if proved and name not in proof.modes:
                proof.modes.append(name)
            elif self.cut and not proved and name not in proof.left_out:
                proof.left_out.append(name)
        both = [{*lengths} for lengths in done.values() if lengths]
        proof.lengths = sorted(set.intersection(*both)) if both else []
        if proof.holds and not (done[self.main[0]] and proof.lengths):
            proof.holds = False
            self._add(self.raised or "there was no time for any length")
        proof.left_out = [n for n in proof.left_out if n not in proof.modes]

    # --- One case ------------------------------------------------------------

    def _case(self, case: Case, lengths: list[int]) -> list[int] | None:
        """Return the lengths at which it is proved, or None if it is open."""
        try:
            run = self.run_of(case)
        except Exception:  # no copy, or none in this dtype
            return []
        proved: list[int] = []
        self.sizes, self.steps = self._control_sizes(lengths), {}
        for time in lengths:
            tokens, targets = self.texts(case, time)
            try:
                open_ = self._is_open(run, tokens, targets)
                if open_ is None and not self._hides(run, tokens, targets):
                    self.proof.at = case, time
                    return None
            except OutOfTime:
                self.cut = True
                break
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
                with self.subject.budget.overtime():
                    self._explain(run, time, open_)
                return None
            proved.append(time)
        if not proved:
            return proved
        try:
            if not self._is_same_program(run, proved[-1]):
                self.proof.at = case, proved[-1]
                return None
            if on_any(self.path not in self.controlled):
                if not self._controlled(run, proved):
                    return None
                self.controlled.add(self.path)
        except OutOfTime:
            if UNCONTROLLED not in self.proof.left_out:
                self.proof.left_out.append(UNCONTROLLED)
        return proved

    def run_of(self, case: Case) -> Followed:
        """Return the model of a case as it is followed."""
        key = case.dtype, case.frozen
        if key not in self.copies:
            built = Case(dtype=case.dtype, frozen=case.frozen)
            copy = copy_for(self.subject, built).copy
            copy.may_fail = copy.rough = False
            self.copies[key] = copy
            if not self.subject.caller.arrays:
                self.subject.builder.put_back_shared()
                copy.built = KeptState(copy.model)
                if self.states is None:
                    self.states = self._find_states(copy)
        copy = self.copies[key]
        states = self.states or States()
        if self.after:
            assert self.states is not None
            copy = replace(copy, built=self.states.worn)
        variant = Variant(self.subject, copy, case)
        kept, derived = copy.built, states.derived
        return Followed(variant, kept, states.moving, derived=derived)

    def _find_states(self, copy: Copy) -> States:
        """Return what calls change; found once where they change nothing.

        A state after calls is that of one copy.
        """
        builder = self.subject.builder
        if builder.states is None:
            found = find_states(self.subject, copy)
            if found.worn is not None:
                return found
            builder.states = found
        return builder.states

    def texts(self, case: Case, time: int) -> tuple[Tokens, Tokens | None]:
        """Return tokens, and targets if they are given."""
        subject, generator = self.subject, self.subject.generator()
        rows = subject.fit_rows(case.rows)
        tokens = subject.draw(rows, time, generator).to(subject.device)
        if not case.targets:
            return tokens, None
        return tokens, subject.draw(rows, time, generator).to(subject.device)

    def _is_open(
        self, run: Followed, tokens: Tokens, targets: Tokens | None
    ) -> tuple[Order, Found] | None:
        """Return what is open at a length, in which order."""
        case, time = run.variant.case, tokens.size(1)
        # ranks may part, each at another step: they are recorded together
        keep = time in self.sizes and not case.losses and current() is None
        for order in self._orders(run):
            tried = []
            for routing in sorted({self.routing, True}):
                tape = Recorded() if keep else None
                found = follow(run, tokens, targets, order, routing, tape)
                self.steps[order, time] = tape
                tried.append(found)
                if not found.open(case.shown(*tokens.shape)):
                    self.routing = routing
                    break
            else:
                found = tried[0]
            self.scores, self.path = found.scores, found.path
            self.notes.update(found.notes)
            left = on_any(bool(found.notes.left))
            if left or found.open(case.shown(*tokens.shape)):
                return order, found
        return None

    def _orders(self, run: Followed) -> tuple[Order, ...]:
        return (self.loss_order,) if run.variant.case.losses else self.orders

    def _is_same_program(self, run: Followed, time: int) -> bool:
        """Whether the scores are those of the model where it is not followed.

        A module of torch's takes other kernels where no mode sees it. In
        train mode these may draw other random numbers.
        """
        if self.scores is None or self._draws(run):
            return True
        tokens, targets = self.texts(run.variant.case, time)
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        scores = run.unfollowed(tokens, targets)
        text = "the model computes other scores where it is not followed"
        apart = self._apart(run, scores, self.scores, everywhere)
        if apart:
            self._add(f"{run.variant.case.name}: {text}, {apart}")
        return not apart

    def _hides(
        self, run: Followed, tokens: Tokens, targets: Tokens | None
    ) -> bool:
        """Whether later tokens move no score where nobody follows them.

        Numbers may be written where no mode sees it, at one length alone.
        A case that draws has a run more, once for each sequence of operations.
        """
        case, subject = run.variant.case, self.subject
        if subject.heavy or case.losses or on_any(self._may_part()):
            return True
        before = self.scores
        if before is None or self._draws(run):
            if not on_any(self.path not in self.unfollowed):
                return True
            self.unfollowed.add(self.path)
            before = run.unfollowed(tokens, targets)
        for order in self._orders(run):
            codes = order.codes(*tokens.shape)
            late, generator = codes > codes.median(), subject.generator()
            other = changed(
                tokens, late, subject.vocab_size, generator, self.special, 0.5
            )
            scores = run.unfollowed(other, targets)
            apart = self._apart(run, scores, before, ~late)
            if on_any(bool(apart)):
                with subject.budget.overtime():
                    named = not self._controlled(run, [tokens.size(1)])
                if not named:
                    text = "scores move where it is not followed"
                    where = apart or "on another rank"
                    self._add(f"{case.name}: {text}, {where}")
                return False
        return True

    def _draws(self, run: Followed) -> bool:
        """Whether it may draw other random numbers where it is followed."""
        return run.variant.case.training or self.subject.noisy

    def _apart(
        self, run: Followed, scores: Tensor, before: Tensor, where: Tensor
    ) -> str:
        """Say how far scores are apart, "" where rounding may explain it."""
        case, (rows, time) = run.variant.case, scores.shape[:2]
        shown = case.shown(rows, time).to(scores.device)
        where = where.to(scores.device) & shown
        apart = minus(scores, before).abs().amax(-1)
        most = float(apart.masked_fill(~where, 0.0).max())
        coarse = case == AUTOCAST or scores.element_size() < 4
        share = SPREAD_OF_ANOTHER_PROGRAM
        if coarse:
            share = SPREAD_OF_ANOTHER_PROGRAM_IN_16_BITS
        # NaN is for check_finite
        if not most > share * float(before[shown].std()):
            return ""
        return f"{most:.2g} apart at length {time}"

    def _may_part(self) -> bool:
        """Whether other tokens may take another path, by the conditions.

        Weights and random numbers that code reads are the same in each run.
        """
        reads = self.notes.reads.values()
        return bool(self.notes.routed) or any(code > FREE for code in reads)

    def _control_sizes(self, lengths: list[int]) -> set[int]:
        """Return a short length, and a longer one unless the model is heavy.

        There the rules are compared with changed tokens.
        """
        heavy, fit = self.subject.heavy, self.subject.lengths.fit
        few = FEWER if heavy else CONTROL
        short = [t for t in lengths if few // 2 < t <= few]
        long = [t for t in lengths if t <= LONG_CONTROL and not heavy]
        return {max(short, default=fit(few)), *sorted(long)[-1:]}

    def _controlled(self, run: Followed, proved: list[int]) -> bool:
        """Change tokens one by one; a wrong rule makes the proof void."""
        vocab, seed = self.subject.vocab_size, self.subject.seed
        sizes = sorted(self._control_sizes(proved))
        for size, order in product(sizes, self._orders(run)):
            tokens, targets = self.texts(run.variant.case, size)
            routing, steps = self.routing, self.steps.get((order, size))
            found = control(
                run,
                tokens,
                targets,
                vocab,
                order,
                routing,
                seed,
                steps,
                self.special,
            )
            if found.wrong is not None:
                name, place = found.wrong
                text = f"numbers change that cannot by the rule of {name}"
                if name == OUTSIDE:
                    text = "numbers that no operation made depend on tokens"
                self._add(f"{place}: {text}", place)
                return False
            if on_any(bool(found.parted and not self._may_part())):
                at = found.parted or "on another rank"
                text = f"{at}: other tokens take another path"
                self._add(text, found.parted)
                return False
        return True

    # --- What is open --------------------------------------------------------

    def _add(self, text: str, place: Place | None = None) -> None:
        self.proof.open.append(Open(text, place))

    def _explain(
        self, run: Followed, time: int, found: tuple[Order, Found]
    ) -> None:
        """Say what is open, and the way of a token that gets through."""
        order, result = found
        for place, name in result.notes.left.items():
            self.proof.leave_torch(place, name)
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
        how = f"at length {time} {run.variant.case.name}{self.after}"
        if order.losses:
            for place in result.notes.compared:
                text = "the scores of a target depend on it, or on a later one"
                self._add(f"{place}: {text} ({how})", place)
            if not result.notes.compared:
                text = "the loss depends on tokens beside its cross-entropies"
                self._add(f"{text} ({how})")
            return
        proof = self.proof
        shown = run.variant.case.shown(*result.reached.shape)
        row, position = result.open(shown)[0]
        token = int(result.reached[row, position])
        reaches = f"token {token} reaches the score of position {position}"
        if order.name != "positions":
            reaches = (
                f"another {order.name[:-1]} reaches the scores of row {row}"
                f"{f', position {position}' * (order.name != 'rows')}"
            )
        elif token >= LONGEST:
            reaches = (
                f"memory that no operation was seen to write reaches the "
                f"score of position {position}"
            )
        try:
            proof.way = in_words(self._find_culprit(run, time, order))
        except Exception as error:  # it adds to what is known
            self._add(f"the way is not known ({sentence(error)})")
        if proof.culprit is None:
            self._add(f"{how} {reaches}")
            return
        by = f" by {proof.way}" if proof.way else ""
        text = f"{proof.culprit} lets it through: {reaches}{by} ({how})"
        self._add(text, proof.culprit)

    def _find_culprit(
        self, run: Followed, time: int, order: Order
    ) -> list[Place]:
        """Find it at a length that is not a other size, if it shows there.

        Returns it between the lines before and after.
        """
        clear = [t for t in CLEAR if t != time and t in self.lengths]
        for length in [*clear, time] if time <= FOLLOWED else ():
            tokens, targets = self.texts(run.variant.case, length)
            routing = self.routing
            rows, reverse = order.name == "rows", None
            for other in self.orders if rows else ():
                if other is not order:
                    reverse = Tape(other.codes(*tokens.shape), rows)
                    follow(run, tokens, targets, other, routing, reverse)
            tape = Tape(order.codes(*tokens.shape), rows, reverse)
            found = follow(run, tokens, targets, order, routing, tape)
            if found.open(run.variant.case.shown(*tokens.shape)):
                place, lines = tape.culprit()
                unknown = next(iter(found.notes.unknown), None)
                self.proof.culprit = unknown or place
                self.proof.in_chunks = tape.in_chunks
                return lines
        return []


# --- Positions, rows, and what is unreached ----------------------------------

ROWS = 3  # of a batch


def prove_positions(
    subject: Subject, lengths: Iterable[int] | None = None
) -> Proof:
    """Prove that no score depends on a later token, in each case."""
    prover = Prover(subject, lengths=lengths)
    cases = [*followed_cases(subject)]
    if TRAIN_TARGETS in subject.unanswered:  # a loss may come back alone
        cases += [LOSSES, *losses_with_arguments(subject)]
        prover.loss_order = _order_of_targets(subject)
    proof, by_targets = prover.prove(cases), cases_of(CAUSALITY, subject)
    proof.never_given = [*subject.never_given]
    proof.declared = [*subject.caller.never]
    followed = (*proof.modes, *proof.left_out)
    if proof.holds and LOSSES in by_targets and LOSSES.name not in followed:
        proof.holds = False
        text = "with targets only a loss comes back, which is not followed"
        proof.open.append(Open(text))
        proof.at = LOSSES, subject.lengths.fit(8)
    if proof.at is not None and proof.at[0] not in by_targets:
        proof.at = None if proof.at[0].losses else proof.at
    return proof


def _order_of_targets(subject: Subject) -> Order:
    """Return whether targets are the next tokens, or are shifted inside.

    Where that is not clear, the order that allows less.
    """
    variant = precise(subject)
    tokens, *targets = subject.draw(6, 7).split(2)
    with suppress(AssertionError):
        scores = variant.scores(tokens)
        found = [scores_and_loss(variant, tokens, t)[1] for t in targets]
        losses = [loss for loss in found if loss is not None]
        if len(losses) == len(targets):
            shifts = shifts_of(scores, targets[0], losses[0])
            shifts |= added_to(scores, targets, losses)[0]
            return AS_GIVEN if shifts == {0} else SHIFTED
    return SHIFTED


def prove_rows(subject: Subject) -> Proof | None:
    """Prove that no score depends on another row; None: it takes no two."""
    rows = subject.fit_rows(ROWS)
    if rows < 2:
        return None
    longest = [] if subject.heavy else [subject.block_size]
    lengths = subject.fit(1, 7, *longest)
    orders = (RISING_ROWS, FALLING_ROWS)
    return Prover(subject, orders, lengths, rows).prove()


def prove_documents(subject: Subject, way: Packing) -> Proof:
    """Prove that no score depends on another document of its row.

    The documents of the rows stand in other places; where a call takes one
    row, those of texts of other lengths do.
    """
    longest = [] if subject.heavy else [subject.block_size]
    rows = 1 if way.single else subject.fit_rows(UNLIKE)
    lengths = subject.fit(3, 8, 20, *longest)
    if rows == 1:
        lengths = subject.fit(*lengths, *(max(lengths) - k for k in (1, 2, 3)))
    places = {time: k for k, time in enumerate(lengths[::-1][:UNLIKE])}

    def lengths_of(time: int, row: int) -> list[int]:
        return split(time, row if rows > 1 else places.get(time, 0))

    def codes(count: int, time: int) -> Codes:
        each = [torch.tensor(lengths_of(time, row)) for row in range(count)]
        ids = [torch.arange(len(n)).repeat_interleave(n) for n in each]
        return torch.stack(ids).to(CODES)

    orders = (
        Order("documents", codes),
        Order("documents", lambda b, t: codes(b, t).max() - codes(b, t)),
    )
    main = [
        replace(way.case(lengths_of, training), rows=rows)
        for training in (False, True)
    ]
    others = [
        replace(case, how=f"{case.how} and targets", targets=True)
        for case, usual in zip(main, (TARGETS, TRAIN_TARGETS), strict=True)
        if usual.fits(subject.caller) and usual not in subject.unanswered
    ]
    return Prover(subject, orders, lengths, main=main).prove(others)


def unreached(subject: Subject, time: int) -> list[int]:
    """Return the tokens that no operation leads from to the last scores.

    Python code that reads tokens leads anywhere.
    """
    if subject.in_arrays:
        return []
    prover = Prover(subject, lengths=[time])
    run = prover.run_of(prover.main[0])
    tokens, _ = prover.texts(prover.main[0], time)
    reached = []
    for order in (POSITIONS, BACKWARDS):
        found = follow(run, tokens, None, order)
        if any(code > FREE for code in found.notes.reads.values()):
            return []
        reached.append(int(found.reached[0, -1]))
    most, least = reached[0], time - 1 - reached[1]
    return [t for t in range(time) if not least <= t <= most]
