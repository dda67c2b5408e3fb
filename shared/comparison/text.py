"""Make every character of texts and tokens visible."""

from ..tokenization.tokenizers import Tokenizer


def visible(text: str, kept: str = "") -> str:
    """Escape characters that cannot be printed, except those in `kept`."""
    return "".join(
        c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one id, with dots for spaces.

    An incomplete character is shown as hexadecimal bytes. An id without text
    is shown as its number.
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
