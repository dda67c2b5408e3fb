"""Proofs of a model: one case after another, until one is open."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..running.errors import ModelRaised, sentence
from ..running.places import place_of_code
from ..running.ranks import on_any
from ..running.variant import Variant
from ..running.ways import EVAL, Case, plan
from ..validation import dtype_name
from .cases import CaseVerdict, prove_case
from .codes import FREE
from .controls import CONTROL, Known
from .engine import follow
from .proof import Open, Proof, leaves_torch
from .runs import Runs
from .shadows import Notes
from .sources import UNSEEDED
from .states import extra_states, saved_constants

SEEDED = 5  # tokens of a text that is followed with several seeds
SEEDS = 40  # with which a branch of one call in ten is hardly missed
MORE_ROWS = (2, 5, 8, 16)
UNCONTROLLED = "the control of its rules"
SHARES = (1 / 2, 4 / 5)  # of the time left, for proofs; a heavy model's

Turn = tuple[Case, list[int]]  # a case, and the lengths of its texts


def prove(
    runs: Runs, main: tuple[Case, ...], others: Iterable[Case] = ()
) -> Proof:
    """Return the proof, which stops at what is open first.

    Args:
        runs: the model.
        main: what is proved at each length: eval and train mode.
        others: cases next to these, at a few lengths.
    """
    subject, others = runs.subject, [*others]
    proof = Proof(order=runs.orders[0].name, main=main)
    if runs.chains is not None:
        proof.sees = runs.chains.declared.name
    subject.proofs[proof.order] = proof
    if subject.is_program:
        proof.leave_open(Open("a program's operations cannot be followed"))
        return proof
    model = runs.of(EVAL).variant
    if subject.caller.arrays:
        proof.leave_open(leaves_torch(place_of_code(model.model)))
        return proof
    kinds = [p.dtype for p in model.parameters if p.is_floating_point()]
    proof.dtype = ", ".join(dict.fromkeys(map(dtype_name, kinds)))
    proof.device = str(subject.device or "cpu")
    with subject.budget.part(share=SHARES[subject.heavy]):
        turns = plan(subject, main, others, [*runs.lengths])
        verdicts = [*_usable(main[0], _fold(runs, turns, Known(Notes())))]
        _take(proof, verdicts)
        known = verdicts[-1].known
        if proof.holds:
            known = _prove_more(runs, proof, others, known)
    subject.budget.something_tried |= proof.holds
    _rest_on_states(runs, proof)
    proof.rest_on(known.notes, subject.is_module)
    return proof


# --- The fold ----------------------------------------------------------------


def _fold(
    runs: Runs, turns: Iterable[Turn], known: Known
) -> Iterator[CaseVerdict]:
    """Yield the verdict of each case, until one is open."""
    for case, lengths in turns:
        try:
            verdict = prove_case(runs, case, lengths, known)
        except Exception as error:  # a fault of the kit costs the proof
            words = f"{case.name}: the proof broke: {sentence(error)}"
            verdict = CaseVerdict(case, known, open=(Open(words),))
        yield verdict
        if verdict.open:
            return
        known = verdict.known


def _usable(
    first: Case, verdicts: Iterable[CaseVerdict]
) -> Iterator[CaseVerdict]:
    """Yield verdicts as long as the first case is proved at some length."""
    proved = False
    for verdict in verdicts:
        proved |= verdict.case == first and bool(verdict.lengths)
        yield verdict
        if not proved:
            return


def _take(proof: Proof, verdicts: list[CaseVerdict]) -> None:
    """Say in a proof which cases are proved, and which one is open."""
    done: dict[Case, set[int]] = {case: set() for case in proof.main}
    cut = dict[Case, str]()
    for verdict in verdicts:
        case = verdict.case
        if verdict.open:
            break
        main = case in done
        name = case.mode if main else case.name
        lengths = done.setdefault(case, set())
        lengths |= {*verdict.lengths}
        if lengths:
            _add_case(proof, case, name)
        elif verdict.cut:
            cut[case] = name
    proof.left_out = [name for case, name in cut.items() if not done[case]]
    _take_open(proof, verdicts)
    both = [done[case] for case in proof.main if done[case]]
    proof.lengths = sorted(set.intersection(*both)) if both else []
    if proof.holds and not (done[proof.main[0]] and proof.lengths):
        raised = [v.raised for v in verdicts if v.raised]
        why = raised[-1] if raised else "there was no time for any length"
        proof.leave_open(Open(why))


def _take_open(proof: Proof, verdicts: list[CaseVerdict]) -> None:
    """Say in a proof what the last of some cases left open."""
    if any(verdict.uncontrolled for verdict in verdicts):
        proof.left_out = [*dict.fromkeys([*proof.left_out, UNCONTROLLED])]
    for verdict in verdicts[-1:]:
        if verdict.open:
            proof.leave_open(*verdict.open)
            proof.culprit, proof.way = verdict.culprit, verdict.way
            proof.in_chunks = verdict.in_chunks
            proof.position = verdict.position
            if verdict.at is not None:
                proof.at = verdict.case, verdict.at


def _add_case(proof: Proof, case: Case, name: str) -> None:
    if case.words and case.words not in proof.given:
        proof.given.append(case.words)
    if case not in proof.cases:
        proof.cases.append(case)
    if name not in proof.modes:
        proof.modes.append(name)


# --- Other draws, other batches, after calls ---------------------------------


def _prove_more(
    runs: Runs, proof: Proof, others: list[Case], known: Known
) -> Known:
    """Prove it with other draws, of other batches and after calls.

    Returns what is known then.
    """
    subject, states = runs.subject, runs.states
    try:
        with subject.budget.overtime():
            _rest_on_constants(runs, proof, others, known)
        proof.states.append("as built")
        more = [*_seeded(runs, proof, others, known), *_crowds(runs, proof)]
        turns = [(case, subject.fit(SEEDED)) for case in more]
        found = [*_fold(runs, turns, known)]
        known = found[-1].known if found else known
        _take_open(proof, found)
        cut = any(verdict.cut for verdict in found)
        done = (*proof.main, *others, *(() if cut else more))
        proof.rows = sorted({case.rows for case in done})
        if proof.holds and states.calls:
            after = f"after {states.calls} calls in train mode"
            if states.worn is None:
                proof.states.append(after)
            else:
                worn = replace(runs, after=f" {after}")
                known = _prove_after(worn, proof, others, known)
    except Exception as error:  # a fault of the kit costs the proof
        proof.leave_open(Open(f"the proof broke: {sentence(error)}"))
    return known


def _prove_after(
    runs: Runs, proof: Proof, others: list[Case], known: Known
) -> Known:
    """Prove it from the state after calls."""
    subject, after = runs.subject, runs.after.strip()
    longest = [] if subject.heavy else runs.lengths[-1:]
    few = [*dict.fromkeys([*subject.fit(2, 5), *longest])]
    short = subject.fit(SEEDED)
    same = [c for c in others if not (c.copy or c.crowd)]
    turns = [(case, few) for case in proof.main]
    turns += [(case, short) for case in same]
    found = [*_fold(runs, turns, known)]
    _take_open(proof, found)
    if not proof.holds and proof.at is not None:
        proof.worn = _worn(runs, proof.at[0])
    cut = any(verdict.cut for verdict in found)
    if cut:
        proof.left_out.append(after)
    refused = any(v.case in proof.main and not v.lengths for v in found)
    if proof.holds and not (cut or refused):
        proof.states.append(after)
    return found[-1].known


def _worn(runs: Runs, case: Case) -> Variant:
    """Return the model after calls, for a test of what is open there."""
    run = runs.of(replace(case, how=f"{case.how}{runs.after}"))
    copy = replace(run.variant.copy, built=run.kept)
    subject = replace(runs.subject, keeps_state=True)
    return replace(run.variant, subject=subject, copy=copy)


def _seeded(
    runs: Runs, proof: Proof, others: list[Case], known: Known
) -> list[Case]:
    """Return cases in which other random numbers choose the path."""
    subject, draws = runs.subject, runs.states.draws
    drawing = {mode for name, mode in draws if name not in UNSEEDED}
    if FREE in known.notes.reads.values() and not subject.heavy:
        drawing = {False, True}  # torch's draws may choose the path
    modes = [m for m in (False, True) if on_any(m in drawing)]
    generator = subject.generator()
    drawn = torch.randint(1, 1 << 31, (SEEDS,), generator=generator)
    return [
        replace(case, seed=seed)
        for case in (*proof.main, *(c for c in others if c.targets))
        if case.training in modes
        for seed in drawn.tolist()
    ]


def _crowds(runs: Runs, proof: Proof) -> list[Case]:
    """Return cases of batches of other sizes, where rows are apart."""
    subject = runs.subject
    if proof.order != "rows" or subject.heavy:
        return []
    counts = dict.fromkeys(subject.fit_rows(n) for n in MORE_ROWS)
    return [
        replace(case, rows=count)
        for count in counts
        if count not in (1, proof.main[0].rows)
        for case in proof.main
    ]


# --- On what it rests --------------------------------------------------------


def _rest_on_states(runs: Runs, proof: Proof) -> None:
    """Say on what of the model's state the proof rests."""
    states = runs.states
    for name, kind in states.unread:
        proof.keep_unread(name, kind)
    for name in states.fixed:
        proof.keep(name)
    for name in states.catching:
        proof.keep_catching(name)
    for name in dict.fromkeys(name for name, _ in states.draws):
        proof.depend_on_draws(name)


def _rest_on_constants(
    runs: Runs, proof: Proof, others: list[Case], known: Known
) -> None:
    """Say which saved numbers must stay: with others it is open."""
    run = runs.of(proof.main[0])
    for name in extra_states(run.variant.model):
        proof.keep_extra_state(name)
    held = {} if run.kept is None else run.kept.tensors
    moving = {id(held[name]) for name in run.moving if name in held}
    groups = [
        kept
        for alike in saved_constants(run.variant.model).values()
        if (kept := [c for c in alike if id(c[1]) not in moving])
    ]
    sample = [*_sampled(runs, proof.main, others)]
    every = [constant for group in groups for constant in group]
    if not every or _is_free(runs, every, sample, known):
        return
    needed = [g for g in groups if not _is_free(runs, g, sample, known)]
    for group in needed or [every]:
        proof.keep_saved(group)


def _sampled(
    runs: Runs, main: tuple[Case, ...], others: list[Case]
) -> Iterator[tuple[Case, int]]:
    """Yield each case of the model as it is built, at a short length."""
    heavy, fit = runs.subject.heavy, runs.subject.lengths.fit
    others = [c for c in others if not (c.copy or c.crowd or heavy)]
    yield from ((case, fit(CONTROL)) for case in (*main, *others))
    lengths = runs.lengths[-1:] if heavy else reversed(runs.lengths)
    yield from product(main, lengths)


def _is_free(
    runs: Runs,
    constants: list[tuple[str, Tensor]],
    sample: list[tuple[Case, int]],
    known: Known,
) -> bool:
    """Whether the proof holds for any values of some saved numbers."""
    free = tuple(tensor for _, tensor in constants)
    for case, time in sample:
        run, text = replace(runs.of(case), free=free), runs.text(case, time)
        shown = case.shown(*text.tokens.shape)
        for order in runs.orders_of(case, text.tokens):
            given = text.tokens, text.targets, order, known.routing
            try:
                found = follow(run, *given)
            except ModelRaised:
                return False
            notes = found.notes
            new = notes.reads.keys() - known.notes.reads.keys()
            rests = bool(new or notes.weak or notes.left)
            if on_any(rests or bool(found.open(shown))):
                return False
    return True
