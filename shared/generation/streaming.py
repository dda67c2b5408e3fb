"""Text as its ids come: characters whole, though ids may hold parts."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tokenization import Tokenizer


class TextStream:
    """Turns ids into text as they come, never half a character.

    Bytes that may still become a character are held back. All that is
    returned, joined, is what `tokenizer.decode` makes of all ids at once;
    an id that the tokenizer leaves unused becomes U+FFFD.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete, often all of theirs."""
        return self._decoder.decode(b"".join(map(self._bytes, ids)))

    def close(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        try:
            return self._tokenizer.decode_bytes([token])
        except ValueError:
            if not 0 <= token < self._tokenizer.n_vocab:
                raise
            return "\ufffd".encode()


def text_of(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    """Return the text of ids, where some may have none."""
    stream = TextStream(tokenizer)
    return stream.feed(ids) + stream.close()
