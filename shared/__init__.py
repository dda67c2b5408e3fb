"""What is neither style: configuration, masks, tokens, checks, commands."""

from .config import GPTConfig
from .tokenization import load_tokenizer

__all__ = ["GPTConfig", "load_tokenizer"]
