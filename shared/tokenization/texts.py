"""Read texts, and cut their ids into batches."""

import hashlib
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor


def default_text() -> str:
    """Return Python's language reference, which comes with Python.

    The text differs between versions of Python, so keep its `text_stamp` with
    each result.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def default_passage() -> str:
    """Return a passage of the default text that begins with a sentence."""
    from pydoc_data.topics import topics

    return topics["for"].partition("\n\n")[2]


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file without changing its line ends.

    Raises:
        ValueError: if the file cannot be read, is empty, or is not UTF-8.
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
            f"at offset {error.start + len(data) - len(error.object)}"
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


def split_ids(
    ids: Int[Tensor, "tokens"],
) -> tuple[Int[Tensor, "train"], Int[Tensor, "validation"]]:
    """Cut a text in two: nine tenths for training, the rest for validation."""
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:]


def random_batch(
    ids: Int[Tensor, "tokens"],
    batch_size: int,
    block_size: int,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "batch time"], Int[Tensor, "batch time"]]:
    """Draw windows of a text at uniformly random starts.

    The generator must be on the CPU.

    Returns:
        The windows, and their targets: the windows one token later. Both are
        on the device of the ids.

    Raises:
        ValueError: for a text that is shorter than a window and its target.

    Source: the lecture "Let's build GPT".
    """
    starts = len(ids) - block_size
    if starts < 1:
        raise ValueError(
            f"a text of {len(ids)} tokens is too short: a window of "
            f"{block_size} and its target require {block_size + 1}"
        )
    start = torch.randint(starts, (batch_size, 1), generator=generator)
    places = (start + torch.arange(block_size)).to(ids.device)
    return ids[places], ids[places + 1]
