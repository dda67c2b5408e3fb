"""The proof of causality, for anyone's model."""

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

    Each number of a forward pass carries the latest position that it can
    depend on, for all weights and tokens; the backward pass is not in it.

    Args:
        model_or_factory: as `check_model` takes it.
        lengths: of the texts; None: each to block_size where that is 64 or
            less, else 1 to 16 and others up to it.
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
