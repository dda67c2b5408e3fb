"""Text to ids and back: the kit's own tokens, bytes, characters, tiktoken."""

import operator
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsIndex

if TYPE_CHECKING:  # imported where it is used: --help need not wait for it
    from tiktoken import Encoding

DEFAULT = "duet-1k"
EMBEDDED = (DEFAULT, "bytes", "char")


class Tokenizer:
    """Turns text into ids in [0, n_vocab) and back, by a tiktoken encoding.

    Special tokens are read as ordinary text.
    """

    def __init__(self, encoding: "Encoding"):
        self.encoding = encoding
        self.n_vocab: int = encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """Return the bytes of ids: one id may hold part of a character."""
        plain = [operator.index(i) for i in ids]
        for i in plain:
            if not 0 <= i < self.n_vocab:
                raise ValueError(
                    f"id {i} is outside the {self.n_vocab} of the tokens"
                )
        try:
            return self.encoding.decode_bytes(plain)
        except KeyError as error:  # an encoding may leave ids out
            raise ValueError(f"no token has this id: {error}") from None


class CharTokenizer(Tokenizer):
    """One id for each distinct character of a text, in sorted order.

    Source: the lecture "Let's build GPT".
    """

    def __init__(self, text: str):
        if not text:
            raise ValueError("a char tokenizer needs a text, got an empty one")
        self.characters = "".join(sorted(set(text)))
        super().__init__(_one_by_one("char", map(str.encode, self.characters)))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the characters; ValueError names unknown ones."""
        if unknown := sorted(set(text) - set(self.characters)):
            raise ValueError(
                f"{len(unknown)} characters are not among the {self.n_vocab} "
                f"known ones: {' '.join(map(repr, unknown[:8]))}"
            )
        return super().encode(text)


def _one_by_one(name: str, tokens: Iterable[bytes]) -> "Encoding":
    """Return an encoding whose tokens are never merged."""
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        name, pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={}
    )


def load_tokenizer(name: str, text: str | None = None) -> Tokenizer:
    """Load a tokenizer by name.

    Args:
        name: "duet-1k", "bytes", "char", or a tiktoken encoding or model
            name ("r50k_base", "davinci").
        text: what "char" takes its characters from.

    Raises:
        ValueError: for an unknown name, for "char" without a text, and for
            an encoding that is neither cached nor can be fetched.
    """
    if name == DEFAULT:
        from .bpe import duet_1k

        return Tokenizer(duet_1k())
    if name == "bytes":
        every = (bytes([byte]) for byte in range(256))  # of UTF-8
        return Tokenizer(_one_by_one(name, every))
    if name == "char":
        return CharTokenizer(text or "")
    return Tokenizer(_load_tiktoken(name))


def _load_tiktoken(name: str):
    import tiktoken

    encodings = tiktoken.list_encoding_names()
    encoding = name
    if name not in encodings:
        try:
            encoding = tiktoken.encoding_name_for_model(name)
        except KeyError:
            raise ValueError(
                f"unknown tokenizer {name!r}; known: "
                f"{', '.join((*EMBEDDED, *encodings))} and tiktoken's "
                "model names"
            ) from None
    try:
        return tiktoken.get_encoding(encoding)
    except Exception as error:  # the network can fail in many ways
        cache = os.environ.get("TIKTOKEN_CACHE_DIR", "not set")
        raise ValueError(
            f"tokenizer {encoding} can be neither fetched "
            f"({type(error).__name__}) nor found in TIKTOKEN_CACHE_DIR "
            f"({cache}); without a network use {', '.join(EMBEDDED[:-1])} or "
            f"{EMBEDDED[-1]}"
        ) from None
