"""Load tokenizers: the kit's own, bytes, characters, tiktoken's."""

import operator
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsIndex

if TYPE_CHECKING:  # for annotations only, so that --help is fast
    from tiktoken import Encoding

DEFAULT = "duet-1k"
EMBEDDED = (DEFAULT, "bytes", "char")


class Tokenizer:
    """Turn text into ids in [0, n_vocab) and back, with a tiktoken encoding.

    Special tokens in a text are encoded as ordinary text.
    """

    def __init__(self, encoding: "Encoding"):
        self.encoding = encoding
        self.n_vocab: int = encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """Return the bytes of ids; an id may hold only part of a character."""
        plain = [operator.index(i) for i in ids]
        for i in plain:
            if not 0 <= i < self.n_vocab:
                raise ValueError(
                    f"id {i} is outside the vocabulary of {self.n_vocab}"
                )
        try:
            return self.encoding.decode_bytes(plain)
        except KeyError as error:  # an encoding may leave ids unused
            raise ValueError(f"no token has this id: {error}") from None


class CharTokenizer(Tokenizer):
    """A tokenizer whose ids are the sorted distinct characters of a text.

    Source: the lecture "Let's build GPT".
    """

    def __init__(self, text: str):
        if not text:
            raise ValueError("a char tokenizer requires a text, got none")
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
        name: "duet-1k", "bytes", "char", or a name of a tiktoken encoding or
            of a model that tiktoken knows ("r50k_base", "davinci").
        text: the text whose characters are the ids of "char".

    Raises:
        ValueError: for an unknown name, for "char" without a text, or for an
            encoding that is not cached and cannot be downloaded.
    """
    if name == DEFAULT:
        from .bpe import duet_1k

        return Tokenizer(duet_1k())
    if name == "bytes":
        every = (bytes([byte]) for byte in range(256))  # the tokens: each byte
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
            f"tokenizer {encoding} is not in TIKTOKEN_CACHE_DIR ({cache}) "
            f"and cannot be downloaded ({type(error).__name__}); without a "
            f"network, use {', '.join(EMBEDDED[:-1])} or {EMBEDDED[-1]}"
        ) from None
