"""Prove causality for any model."""

from collections.abc import Iterable
from typing import Any, Unpack

from ..proof.claims import prove_positions
from ..proof.proof import Open, Proof
from ..running.context import isolated, one_run
from ..running.meeting import meet
from ..settings import Settings
from .compiled import require_same_program, require_true_blocks
from .followed import follow_caches


@one_run
def prove_causality(
    model_or_factory: Any,
    *,
    lengths: Iterable[int] | None = None,
    **settings: Unpack[Settings],
) -> Proof:
    """Prove that no score depends on a later token.

    For each tensor entry in a forward pass, the proof tracks the latest
    position on which it can depend, for all weights and tokens. It does not
    cover the backward pass.

    Args:
        model_or_factory: as `check_model` takes it.
        lengths: lengths of the texts. None means all up to block_size if that
            is 64 or less. Otherwise it means 1 to 16, and others up to
            block_size.
        **settings: vocab_size, block_size, outputs, layout, seed, device
            and inputs, as for `check_model`.

    Raises:
        UnusableModel: for a model that cannot be built, called or read.
        ValueError: for lengths that the model does not accept.
    """
    with isolated(settings.get("seed", 0)):
        subject = meet(model_or_factory, **settings)
        subject.require_scores()
        with subject.few_threads():
            proof = prove_positions(subject, lengths)
            follow_caches(subject, proof)
            try:
                require_true_blocks(subject)
                require_same_program(subject, proof)
            except AssertionError as error:
                proof.holds = False
                proof.open.append(Open(str(error)))
            return proof
