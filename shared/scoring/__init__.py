"""Check scorers (perplexity, bits per byte), and compare two of them."""

from .scorer import check_scorer

__all__ = ["check_scorer"]
