"""Turn ids into text as they come, in whole characters."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tokenization import Tokenizer


class TextStream:
    """Turn ids into text as they come, but never into half a character.

    Bytes that may yet become a character are held back. The joined parts are
    the text that `tokenizer.decode` returns for all ids at once, except that
    ids unknown to the tokenizer become U+FFFD.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        return self._decoder.decode(b"".join(map(self._bytes, ids)))

    def close(self) -> str:
        """Return the rest of the text; half a character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        try:
            return self._tokenizer.decode_bytes([token])
        except ValueError:
            if not 0 <= token < self._tokenizer.n_vocab:
                raise
            return "\ufffd".encode()


def text_of(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    """Return the text of ids, even if some ids stand for no text."""
    stream = TextStream(tokenizer)
    return stream.feed(ids) + stream.close()
