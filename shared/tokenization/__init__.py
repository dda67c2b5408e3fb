"""Tokenization: text to ids and back, and ids to batches.

    tokenizers.py      load_tokenizer: the kit's own tokens, bytes,
                       characters, tiktoken's encodings
    bpe.py             the kit's own byte-pair tokenizer, and its trainer
    duet_1k.tiktoken   the merges it learned, in tiktoken's format
    texts.py           texts read, split, and cut into batches

`python -m gpt_duet.tokenization.bpe` trains the kit's tokenizer again.
"""

from .tokenizers import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
