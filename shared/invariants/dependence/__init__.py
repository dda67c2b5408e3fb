"""Which tokens a number can depend on: proofs instead of tests."""

from .proof import Open, Proof

__all__ = ["Open", "Proof"]
