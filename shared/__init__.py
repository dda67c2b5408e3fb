"""What is neither style: configuration, masks, tokens, checks, commands."""

from .config import GPTConfig
from .generation import generate
from .tokenization import load_tokenizer

__all__ = ["GPTConfig", "generate", "load_tokenizer"]
