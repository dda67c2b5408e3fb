"""Text to ids and back: tokenizers, and the texts that they read."""

from .tokenizers import (
    DEFAULT,
    EMBEDDED,
    ByteTokenizer,
    CharTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
)

__all__ = [
    "DEFAULT",
    "EMBEDDED",
    "ByteTokenizer",
    "CharTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "load_tokenizer",
]
