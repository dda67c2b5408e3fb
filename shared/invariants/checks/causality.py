"""No position sees what follows it."""

from ..check import Budget, SkipCheck, Subject, check
from ..dependence.prove import prove_positions
from ..explain import explain
from ..leak_rounds import LeakRounds
from ..leaks import LeakFinder
from ..model.calling import MASK
from ..variant import CopyFailed
from ..ways import CAUSALITY, ways_of

DRAWS = "in train mode the shape of random draws depends on the tokens"
MIXED = "rows depend on each other: see check_batch_independence"


@check(calls=600, rows=500, share=6)
def check_causality(subject: Subject, budget: Budget) -> str:
    """Tokens from a split on never change an output before it.

    Why: a model that sees the token it should predict trains to a loss that
    means nothing, and generates noise.
    How: first a proof: each number of a forward pass carries the latest
    position that it can depend on (dependence/). Where the proof is open,
    and a little where it is not, sequences that are equal up to a split go
    through in batches of equal shape; before the split the scores must be
    the same. In eval and
    train mode (the same dropout in both), one row alone, with and without
    gradients and masks, in several dtypes, ended in each id, and on copies
    with larger weights, in which a mask of -1e4 no longer hides a leak. A
    difference counts if it stays when weights are nudged: see rounding.py.
    Reports: huggingface/transformers 48745; karpathy/nanochat 844.
    """
    if subject.block_size < 2:
        raise SkipCheck("one token has no future")
    subject.require_no_state()
    proof = budget.proof = prove_positions(subject, budget)
    rounds = LeakRounds(subject, budget, proof.at)
    finder = LeakFinder()
    for round, splits in budget.affordable(
        rounds.of_the_rules() if proof.complete else rounds
    ):
        for trial in round.trials(splits):
            try:
                leak = finder.find(round.variant, trial)
            except CopyFailed as error:
                budget.give_up(round.label, str(error))
                break
            if leak is not None:
                raise explain(round.variant, leak, proof.way)
    if not finder.moved and not budget.nothing_tried:
        raise AssertionError(
            "no change of any token moves any score, so nothing can be said "
            "about the future"
        )
    never = [
        name
        for name in subject.caller.optional
        if name not in (MASK, subject.caller.target_name)
        and name not in {way.given for way in ways_of(CAUSALITY, subject)}
    ]
    notes = [MIXED] * finder.rows_mix + [DRAWS] * finder.draws_differ
    if never:
        notes.append(f"never given: {', '.join(never)}")
    tested = f"tested: {budget.tried}" if budget.tried else ""
    return "; ".join(filter(None, [str(proof), tested, *notes]))
