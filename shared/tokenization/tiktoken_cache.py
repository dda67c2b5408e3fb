"""Which of tiktoken's encodings can be had without a network."""

import hashlib
import os
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import tiktoken.load
import tiktoken.registry

_PATCHING = threading.Lock()


@dataclass(frozen=True)
class Availability:
    """Whether a tokenizer works here and now, and what it is or why not.

    n_vocab is None where the number of ids is not known.
    """

    name: str
    n_vocab: int | None
    note: str
    works: bool = True


class _NotCached(Exception):
    """A file that an encoding needs is not there."""


def cache_folder() -> Path | None:
    """Return where tiktoken keeps its files; None where it keeps none."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if variable in os.environ:
            folder = os.environ[variable]
            return Path(folder) if folder else None
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def look_up(name: str) -> Availability:
    """Look for an encoding's files in tiktoken's cache, and nowhere else.

    The encoding's own constructor says which files it needs, and with which
    SHA-256; its reader is exchanged for one that never fetches.
    """
    if name in tiktoken.registry.ENCODINGS:
        n_vocab = tiktoken.registry.ENCODINGS[name].n_vocab
        return Availability(name, n_vocab, "tiktoken, loaded")
    tiktoken.list_encoding_names()  # fills the constructors
    constructors = tiktoken.registry.ENCODING_CONSTRUCTORS or {}
    try:
        with _never_fetching():
            parts = constructors[name]()
    except _NotCached as missing:
        return Availability(name, None, str(missing), works=False)
    except Exception as error:  # a plugin can fail in any way
        note = f"its constructor fails: {type(error).__name__}: {error}"
        return Availability(name, None, note, works=False)
    ids = [*parts["mergeable_ranks"].values()]
    ids += parts["special_tokens"].values()
    return Availability(name, max(ids) + 1, "tiktoken, cached")


@contextmanager
def _never_fetching():
    with _PATCHING:
        reader = tiktoken.load.read_file_cached
        tiktoken.load.read_file_cached = _read_cached
        try:
            yield
        finally:
            tiktoken.load.read_file_cached = reader


def _read_cached(blobpath: str, expected_hash: str | None = None) -> bytes:
    if "://" not in blobpath:  # a plugin's own file
        return Path(blobpath).read_bytes()
    folder = cache_folder()
    if folder is None:
        raise _NotCached("tiktoken's cache is switched off")
    file = folder / hashlib.sha1(blobpath.encode()).hexdigest()
    if not file.is_file():
        raise _NotCached(f"not cached in {folder}")
    data = file.read_bytes()
    if expected_hash and hashlib.sha256(data).hexdigest() != expected_hash:
        raise _NotCached(f"damaged in tiktoken's cache: {file}")
    return data
