"""Where texts come from: Python's own documentation, or a file."""

import hashlib
from pathlib import Path


def default_text() -> str:
    """Return Python's language reference, which comes with Python.

    It differs from version to version: stamp results with `text_stamp`.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file, line ends untouched.

    Raises:
        ValueError: for a file that is missing, a folder, unreadable, empty
            or not UTF-8.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} "
            f"at offset {error.start}"
        ) from None
    if not text:
        raise ValueError(f"{path} is empty")
    if "\0" in text:
        raise ValueError(
            f"{path} is not text: a zero byte at offset {data.index(0)}"
        )
    return text


def text_stamp(text: str) -> str:
    """Return the first digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
