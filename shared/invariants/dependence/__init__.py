"""Which tokens a number can depend on: proofs instead of tests."""

from .proof import Open, Proof
from .prove import prove_causality

__all__ = ["Open", "Proof", "prove_causality"]
