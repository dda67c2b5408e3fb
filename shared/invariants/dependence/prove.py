"""What is proved: that no later token, and no other row, reaches a score."""

from collections.abc import Iterable
from typing import Any

import torch

from ..budget import Budget
from ..context import one_run
from ..meeting.meet import meet
from ..randomness import isolated
from ..subject import Subject
from ..ways import CAUSALITY, LOSSES, TRAIN_TARGETS, ways_of
from .cases import Case, cases
from .engine import BACKWARDS, FALLING_ROWS, POSITIONS, RISING_ROWS, follow
from .lattice import FREE
from .proof import Open, Proof
from .prover import Prover

ROWS = 3  # of a batch


@one_run
def prove_causality(
    model_or_factory: Any,
    *,
    lengths: Iterable[int] | None = None,
    vocab_size: int | None = None,
    block_size: int | None = None,
    outputs: str = "auto",
    layout: str = "bt",
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Proof:
    """Prove that no score depends on a later token.

    Each number of a forward pass carries the latest position that it can
    depend on, for all weights and tokens; the backward pass is not in it.

    Args:
        model_or_factory: as `check_model` takes it.
        lengths: of the texts; None: 1 to 16, others up to block_size.
        vocab_size: number of tokens; None: as the model declares it.
        block_size: longest text; None: as the model declares it.
        outputs: "logits", "log_probs" or "auto".
        layout: "tb" for a model that takes (time, batch).
        seed: of weights and tokens.
        device: where to run; None: where the model is.

    Raises:
        UnusableModel: for a model that cannot be built, called or read.
        ValueError: for lengths that the model does not accept.
    """
    with isolated(seed):
        subject = meet(
            model_or_factory,
            vocab_size=vocab_size,
            block_size=block_size,
            outputs=outputs,
            layout=layout,
            seed=seed,
            device=device,
        )
        subject.require_scores()
        with subject.few_threads():
            return prove_positions(subject, Budget(), lengths)


def prove_positions(
    subject: Subject, budget: Budget, lengths: Iterable[int] | None = None
) -> Proof:
    """Prove that no score depends on a later token, in each way it is run."""
    prover = Prover(subject, budget, lengths=lengths)
    proof = prover.prove(cases(subject))
    ways = ways_of(CAUSALITY, subject)
    if proof.proved and LOSSES in ways and TRAIN_TARGETS not in ways:
        proof.proved = False
        text = "with targets only a loss comes back, which is not followed"
        proof.open.append(Open(text))
        proof.at = Case(LOSSES), subject.lengths.fit(8)
    return proof


def prove_rows(subject: Subject, budget: Budget) -> Proof | None:
    """Prove that no score depends on another row; None: it takes no two."""
    rows = subject.fit_rows(ROWS)
    if rows < 2:
        return None
    longest = [] if subject.heavy else [subject.block_size]
    lengths = subject.fit(1, 7, *longest)
    orders = (RISING_ROWS, FALLING_ROWS)
    return Prover(subject, budget, orders, lengths, rows).prove()


def unreached(subject: Subject, budget: Budget, time: int) -> list[int]:
    """Return the tokens that no operation leads from to the last scores.

    Python code that reads tokens leads anywhere.
    """
    if subject.in_arrays:
        return []
    prover = Prover(subject, budget, lengths=[time])
    case = prover.main[0]
    run = prover._run(case)
    tokens, _ = prover._given(case, time)
    least, most = 0, time - 1
    for order in (POSITIONS, BACKWARDS):
        found = follow(run, run.parameters, tokens, None, order)
        if any(code > FREE for code in found.notes.reads.values()):
            return []
        reached = int(found.reached[0, -1])
        if order is POSITIONS:
            most = reached
        else:
            least = time - 1 - reached
    return [t for t in range(time) if not least <= t <= most]
