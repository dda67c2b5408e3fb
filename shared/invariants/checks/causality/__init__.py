"""No position sees what follows it."""

from collections.abc import Iterator

from ....proof.claims import prove_positions
from ....running.budget import in_short
from ....running.errors import NoTargetLeftOut, NotFinite
from ....running.tokens import spans
from ....running.variant import CopyFailed
from ...check import SkipCheck, Subject, check
from ...compiled import require_same_program, require_true_blocks
from ...followed import follow_caches
from ...leaks import LeakFinder, trials
from .smallest import explain, not_finite

DRAWS = "in train mode the shape of random draws depends on the tokens"
MIXED = "rows depend on each other: see check_batch_independence"


@check(share=8)
def check_causality(subject: Subject) -> str:
    """Tokens from a split on never change an output before it.

    Why: a model that sees the token it should predict trains to a loss that
    means nothing, and generates noise.
    How: first a proof: each number of a forward pass carries the latest
    position that it can depend on (the room `proof`). Where the proof is open,
    and a little where it is not, sequences that are equal up to a split go
    through in batches of equal shape; before the split the scores must be
    the same: in each case of the table (ways.py), ended in each id, and with
    larger weights, in which a mask of -1e4 no longer hides a leak. A
    difference counts if it stays when weights are nudged (rounding.py).
    Reports: huggingface/transformers 48745; karpathy/nanochat 844.
    """
    if subject.block_size < 2:
        raise SkipCheck("one token has no future")
    subject.require_no_state()
    budget, finder = subject.budget, LeakFinder()
    blocks, declared = require_true_blocks(subject), subject.sees is not None
    proof = prove_positions(subject)
    follow_caches(subject, proof)
    for trial in trials(subject, proof):
        with budget.part(trial.label, trial.time, trial.share):
            try:
                leak = finder.find(trial)
            except (CopyFailed, NoTargetLeftOut) as error:
                budget.give_up(trial.label, str(error))
                continue
            except NotFinite as error:
                raise not_finite(trial, str(error)) from None
            if leak is not None:
                with subject.budget.overtime():
                    raise explain(leak, proof)
        budget.say(lambda: "; ".join(_tried(finder, declared)))
    if finder.tried and not finder.moved:
        raise AssertionError(
            "no change of any token moves any score, so nothing can be said "
            "about the future"
        )
    said = (require_same_program(subject, proof), blocks)
    notes = [sentence for sentence in said if sentence]
    notes += [MIXED] * finder.rows_mix + [DRAWS] * finder.draws_differ
    if subject.instead:
        notes.append(f"tokens are ids, never {', '.join(subject.instead)}")
    tested = [f"tested: {'; '.join(_tried(finder, declared))}"] * bool(
        finder.tried
    )
    return "; ".join([proof.sentence, *tested, *notes])


def _tried(finder: LeakFinder, declared: bool) -> Iterator[str]:
    """Yield which splits were tried, of how many, with the cases' names."""
    names: dict[str, list[str]] = {}
    for label, lengths in finder.tried.items():
        # of a declaration the first position may be forbidden some as well
        less = 0 if declared else 1
        whole = [t for t, done in lengths.items() if len(done) == t - less]
        what = "positions" if declared else "splits"
        parts = [f"all {what} at {spans(whole)}"] if whole else []
        for time in sorted(lengths.keys() - {*whole}):
            parts.append(f"{len(lengths[time])} of {time - less} at {time}")
        names.setdefault(", ".join(parts), []).append(label)
    for text, labels in names.items():
        yield f"{in_short(labels)}: {text}"
