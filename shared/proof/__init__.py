"""Prove, rather than test, which tokens each score can depend on."""

from .proof import Open, Proof

__all__ = ["Open", "Proof"]
