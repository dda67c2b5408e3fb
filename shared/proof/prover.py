"""Prove a model case by case, up to the first case that stays open."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..running.errors import ModelRaised, sentence
from ..running.places import place_of_code
from ..running.ranks import on_any
from ..running.subject import Subject
from ..running.tokens import SHORT
from ..running.variant import Variant
from ..running.ways import BETWEEN, CROWD_TIME, EVAL, Case
from ..validation import dtype_name
from ..visibility import takes_tokens
from .cases import CaseVerdict, prove_case
from .codes import FREE
from .controls import CONTROL_TOKENS, SoFar
from .engine import ModelRun, follow
from .proof import Open, Proof, leaves_torch
from .runs import Runs
from .shadows import Notes
from .sources import is_seeded
from .states import extra_states, saved_constants

FIRST = 2  # how many lengths of a main case are proved before the other cases
SEEDED = 5  # tokens of the text that is followed with several seeds
SEEDS = 40  # enough seeds to find a branch that one call in ten takes
MORE_ROWS = (2, 5, 8, 16)
UNCONTROLLED = "the control of its rules"
SHARES = (1 / 2, 4 / 5)  # shares of the time left, for light and heavy models

Turn = tuple[Case, list[int]]  # a case, and the lengths of its texts


def prove(
    runs: Runs, main: tuple[Case, ...], others: Iterable[Case] = ()
) -> Proof:
    """Prove each case in turn; stop at the first that cannot be proved.

    Args:
        runs: the model.
        main: the cases to prove at each length: eval and train mode.
        others: further cases, which are proved at a few lengths.
    """
    subject, others = runs.subject, [*others]
    proof = Proof(order=runs.orders[0].name, main=main)
    if runs.chains is not None:
        proof.sees = runs.chains.declared.name
    subject.proofs[proof.order] = proof  # replaces this order's earlier proof
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
        verdicts = [*_usable(main[0], _fold(runs, turns, SoFar(Notes())))]
        _take(proof, verdicts)
        so_far = verdicts[-1].so_far
        if proof.holds:
            so_far = _prove_more(runs, proof, others, so_far)
    subject.budget.something_tried |= proof.holds
    _rest_on_states(runs, proof)
    proof.rest_on(so_far.notes, subject.is_module)
    return proof


# --- Case by case ------------------------------------------------------------


def _fold(
    runs: Runs, turns: Iterable[Turn], so_far: SoFar
) -> Iterator[CaseVerdict]:
    """Yield the verdict of each case, up to the first unproved one."""
    for case, lengths in turns:
        try:
            verdict = prove_case(runs, case, lengths, so_far)
        except Exception as error:  # a fault of the kit ends only the proof
            words = f"{case.name}: the proof broke: {sentence(error)}"
            verdict = CaseVerdict(case, so_far, open=(Open(words),))
        yield verdict
        if verdict.open:
            return
        so_far = verdict.so_far


def _usable(
    first: Case, verdicts: Iterable[CaseVerdict]
) -> Iterator[CaseVerdict]:
    """Yield verdicts; stop if the first case could not be proved."""
    proved = False
    for verdict in verdicts:
        proved |= verdict.case == first and bool(verdict.lengths)
        yield verdict
        if not proved:
            return


def _take(proof: Proof, verdicts: list[CaseVerdict]) -> None:
    """Add the proved cases, and the unproved one, to a proof."""
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
    """If the last case is open, add the reasons to the proof."""
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


# --- The proof repeated: other seeds, other batch sizes, after calls ---------


def _prove_more(
    runs: Runs, proof: Proof, others: list[Case], so_far: SoFar
) -> SoFar:
    """Repeat the proof with other seeds, other batch sizes, and after calls.

    Return what all runs so far have shown.
    """
    subject, states = runs.subject, runs.states
    try:
        with subject.budget.overtime():
            _rest_on_constants(runs, proof, others, so_far)
        proof.states.append("as built")
        more = [*_seeded(runs, proof, others, so_far), *_crowds(runs, proof)]
        turns = [(case, subject.fit(SEEDED)) for case in more]
        found = [*_fold(runs, turns, so_far)]
        so_far = found[-1].so_far if found else so_far
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
                so_far = _prove_after(worn, proof, others, so_far)
    except Exception as error:  # a fault of the kit ends only the proof
        proof.leave_open(Open(f"the proof broke: {sentence(error)}"))
    return so_far


def _prove_after(
    runs: Runs, proof: Proof, others: list[Case], so_far: SoFar
) -> SoFar:
    """Prove the model again, from the state in which calls have left it."""
    subject, after = runs.subject, runs.after.strip()
    longest = [] if subject.heavy else runs.lengths[-1:]
    few = [*dict.fromkeys([*subject.fit(2, 5), *longest])]
    short = subject.fit(SEEDED)
    same = [c for c in others if not _is_rare(c)]
    turns = [(case, few) for case in proof.main]
    turns += [(case, short) for case in same]
    found = [*_fold(runs, turns, so_far)]
    _take_open(proof, found)
    if not proof.holds and proof.at is not None:
        proof.worn = _worn(runs, proof.at[0])
    cut = any(verdict.cut for verdict in found)
    if cut:
        proof.left_out.append(after)
    refused = any(v.case in proof.main and not v.lengths for v in found)
    if proof.holds and not (cut or refused):
        proof.states.append(after)
    return found[-1].so_far


def _worn(runs: Runs, case: Case) -> Variant:
    """Return the model after calls, to try whether the open case leaks."""
    run = runs.of(replace(case, how=f"{case.how}{runs.after}"))
    return replace(
        run.variant, subject=replace(runs.subject, keeps_state=True)
    )


def _seeded(
    runs: Runs, proof: Proof, others: list[Case], so_far: SoFar
) -> list[Case]:
    """Return cases with other random seeds, which may choose other paths."""
    subject, draws = runs.subject, runs.states.draws
    drawing = {mode for source, mode in draws if is_seeded(source)}
    if FREE in so_far.notes.reads.values() and not subject.heavy:
        drawing = {False, True}  # torch's draws may choose the path in both
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
    """Return cases with other batch sizes, if the proof is about rows."""
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


# --- Assumptions -------------------------------------------------------------


def _rest_on_states(runs: Runs, proof: Proof) -> None:
    """Add assumptions about the model's state."""
    states = runs.states
    if states.lost:
        words = f"not all calls of the model were inspected: {states.lost}"
        proof.leave_open(Open(words))
    for name, kind in states.unread:
        proof.keep_unread(name, kind)
    for name in states.fixed:
        proof.keep(name)
    for name in states.catching:
        proof.keep_catching(name)
    for source in dict.fromkeys(source for source, _ in states.draws):
        proof.depend_on_draws(source)


def _rest_on_constants(
    runs: Runs, proof: Proof, others: list[Case], so_far: SoFar
) -> None:
    """Assume that saved constants do not change, if the proof needs it.

    A checkpoint sets these tensors, but training does not.
    """
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
    proved = [] if runs.subject.heavy else filter(_is_rare, proof.cases)
    short = runs.subject.lengths.fit(CONTROL_TOKENS)
    rare = [(case, short) for case in proved]
    every = [constant for group in groups for constant in group]
    if not every or _is_free(runs, every, [*sample, *rare], so_far):
        return
    needed = [g for g in groups if not _is_free(runs, g, sample, so_far)]
    for group in needed or [every]:
        proof.keep_saved(group)


def _is_rare(case: Case) -> bool:
    """Return whether a case runs a copy of the model, or many rows."""
    return bool(case.copy or case.crowd)


def _sampled(
    runs: Runs, main: tuple[Case, ...], others: list[Case]
) -> Iterator[tuple[Case, int]]:
    """Yield each case with a short length, and main cases with long ones."""
    heavy, fit = runs.subject.heavy, runs.subject.lengths.fit
    others = [] if heavy else [c for c in others if not _is_rare(c)]
    yield from ((case, fit(CONTROL_TOKENS)) for case in (*main, *others))
    lengths = runs.lengths[-1:] if heavy else reversed(runs.lengths)
    yield from product(main, lengths)


def _is_free(
    runs: Runs,
    constants: list[tuple[str, Tensor]],
    sample: list[tuple[Case, int]],
    so_far: SoFar,
) -> bool:
    """Return whether the proof holds for all values of these constants."""
    for case, time in sample:
        run, text = runs.of(case), runs.text(case, time)
        held = _in_copy(run, constants) if case.copy else constants
        run = replace(run, free=tuple(tensor for _, tensor in held))
        shown = case.shown(*text.tokens.shape)
        for order in runs.orders_of(case, text.tokens):
            given = text.tokens, text.targets, order, so_far.routing
            try:
                found = follow(run, *given)
            except ModelRaised:
                return False
            notes = found.notes
            new = notes.reads.keys() - so_far.notes.reads.keys()
            rests = bool(new or notes.weak or notes.left)
            if on_any(rests or bool(found.open(shown))):
                return False
    return True


def _in_copy(
    run: ModelRun, constants: list[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Return the constants of a copy that have the names of these."""
    names = {name for name, _ in constants}
    every = saved_constants(run.variant.model).values()
    return [each for alike in every for each in alike if each[0] in names]


# --- The order in which cases and lengths are proved -------------------------


def _telling(subject: Subject, lengths: list[int]) -> list[int]:
    """Return the shortest lengths at which declared visibility is not causal.

    One is the first length at which an earlier token is hidden, the other the
    first at which a later token is visible.
    """
    if subject.sees is None or takes_tokens(subject.sees.sees):
        return []
    found = dict[str, int]()
    for time in lengths:
        seen = subject.sees.of(torch.zeros(1, time, dtype=torch.long))[0]
        causal = torch.ones_like(seen).tril()
        if bool((causal & ~seen).any()):
            found.setdefault("hides", time)
        if bool((seen & ~causal).any()):
            found.setdefault("shows", time)
        if len(found) == 2:
            break
    return [*found.values()]


def plan(
    subject: Subject,
    main: Iterable[Case],
    others: Iterable[Case],
    lengths: list[int],
) -> Iterator[Turn]:
    """Yield the cases in the order of proof, each with lengths of text.

    The main cases come first, at length two and at the longest length. Then
    come the other cases, at a few lengths. The main cases at the remaining
    lengths come last. So every case has a turn even if time is short. For
    declared visibility, the lengths of `_telling` come early as well.
    """
    longest = max(lengths)
    few = {*BETWEEN[1:]} if subject.heavy else {*BETWEEN, longest}
    some = [time for time in lengths if time in few] or lengths[:1]
    if subject.budget.limited:
        telling = _telling(subject, lengths)
        early = {2, *telling, longest}
        if not telling:  # the longest text comes first
            lengths = sorted(lengths, key=lambda t: t <= SHORT)
        lengths = sorted(lengths, key=lambda t: t not in early)
        first = max(FIRST, len(early & {*lengths}))
    else:
        first = len(lengths)
    yield from ((case, lengths[:first]) for case in main)
    crowd = [subject.lengths.fit(CROWD_TIME)]
    one = [time for time in some if time == BETWEEN[-1]] or some[:1]
    for case in others:
        yield case, crowd if case.crowd else one if case.of_several else some
    if lengths[first:]:
        yield from ((case, lengths[first:]) for case in main)
