"""No position sees a later token."""

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
from .message import failure_of, not_finite

DRAWS = "in train mode the shape of random draws depends on the tokens"
UNREACHED = "no text was found that takes another path at {}"
MIXED = "rows depend on each other: see check_batch_independence"


@check(share=10)
def check_causality(subject: Subject) -> str:
    """Tokens from a split on never change an output before it.

    Why: if a model sees the token that it should predict, its loss means
    nothing, and it generates noise.
    How: first a proof tracks, for each tensor entry in a forward pass, the
    latest position on which it can depend (the package `proof`). Then the
    model runs pairs of sequences that are equal up to a split: a few pairs if
    the proof succeeds, many if it stays open. Before the split, scores must be
    equal. This is tried in each way to call the model (ways.py), with each id
    at the end, and with larger weights, whose scores exceed a mask of -1e4. A
    difference counts only if it remains when weights change in their last bits
    (rounding.py).
    If it fails: the message names the position that sees a later token, that
    token, and the first line whose value changes. There, look for the mask, an
    axis, a statistic over time, or a view or reshape that takes heads or rows
    for time. "With weights scaled up" means that large scores outweigh the
    number in the mask. Fill with minus infinity. "The compiled program is
    another function" means that torch.compile changed the scores. "BlockMask
    ... is not its mask_mod" means that FlexAttention lists a block as full
    though some of it is hidden, or leaves it out though some of it is visible.
    Put a window into mask_mod as well. `--map FILE` draws which token changes
    the scores of which position.
    Reports: issues huggingface/transformers 48745, karpathy/nanochat 844.
    """
    if subject.block_size < 2:
        raise SkipCheck("one token has no future")
    subject.require_no_state()
    budget, finder = subject.budget, LeakFinder()
    blocks, declared = require_true_blocks(subject), subject.sees is not None
    proof = prove_positions(subject)
    follow_caches(subject, proof)  # adds decoding with a cache to the proof
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
                    raise failure_of(leak, proof)
        budget.say(lambda: "; ".join(_tried(finder, declared)))
    if finder.tried and not finder.moved:
        raise AssertionError(
            "no change of any token moves any score, so nothing can be said "
            "about the future"
        )
    # adds the compiled program to the proof
    compiled = require_same_program(subject, proof)
    notes = [sentence for sentence in (compiled, blocks) if sentence]
    notes += [MIXED] * finder.rows_mix + [DRAWS] * finder.draws_differ
    if subject.instead:
        notes.append(f"tokens are ids, never {', '.join(subject.instead)}")
    tested = [f"tested: {'; '.join(_tried(finder, declared))}"] * bool(
        finder.tried
    )
    # an open proof is not a failure: the sentence says what is open
    forks = [] if declared or finder.two_paths else proof.forks[:1]
    missed = [UNREACHED.format(place) for place in forks]
    return "; ".join([*missed, proof.sentence, *tested, *notes])


def _tried(finder: LeakFinder, declared: bool) -> Iterator[str]:
    """Yield, for each case, how many splits were tried at each length."""
    names: dict[str, list[str]] = {}
    for label, lengths in finder.tried.items():
        # splits of a causal text start at 1; a declaration may also hide
        # tokens from position 0
        less = 0 if declared else 1
        whole = [t for t, done in lengths.items() if len(done) == t - less]
        what = "positions" if declared else "splits"
        parts = [f"all {what} at {spans(whole)}"] if whole else []
        for time in sorted(lengths.keys() - {*whole}):
            parts.append(f"{len(lengths[time])} of {time - less} at {time}")
        names.setdefault(", ".join(parts), []).append(label)
    for text, labels in names.items():
        yield f"{in_short(labels)}: {text}"
