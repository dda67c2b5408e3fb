"""Turn text into ids and back, and ids into batches.

    tokenizers.py      load_tokenizer: the kit's own tokens, bytes,
                       characters, tiktoken's encodings
    bpe.py             the kit's own byte-pair tokenizer, and its trainer
    duet_1k.tiktoken   the merges that it learned, in tiktoken's format
    texts.py           reads texts, splits them, and cuts them into batches

`python -m gpt_duet.tokenization.bpe` trains the kit's tokenizer again.
"""

from .tokenizers import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
