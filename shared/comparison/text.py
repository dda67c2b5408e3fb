"""Texts and tokens, so that every character of them can be seen."""

from ..tokenization.tokenizers import Tokenizer


def visible(text: str, kept: str = "") -> str:
    """Spell out what cannot be printed; spaces and `kept` stay."""
    return "".join(
        c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one id, its spaces as dots.

    Bytes that are only part of a character are written in hexadecimal, an
    id without text as its number.
    """
    try:
        data = tokenizer.decode_bytes([token])
    except ValueError:
        return f"(id {token})"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data.hex(" ")
    return visible(text).replace(" ", "\u00b7")
