"""Prove which tokens a number can depend on, instead of testing it."""

from .proof import Open, Proof

__all__ = ["Open", "Proof"]
