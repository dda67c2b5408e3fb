"""The kit's own tokenizer: byte-pair merges, learned from a text.

`python -m shared.tokenization.bpe` learns them again; its --help says how.
"""

import argparse
import base64
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import tiktoken

from ..console import run
from ..files import write_atomically
from .texts import default_text, read_text, text_stamp

NAME = "duet-1k"
N_VOCAB = 1024
END_OF_TEXT = "<|endoftext|>"

# Merges never cross these pieces: a word with the space in front of it, one
# digit, a run of punctuation, a run of spaces up to a word's own.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

RANKS_FILE = Path(__file__).with_name("duet_1k.tiktoken")
# The text that RANKS_FILE was learned from: `text_stamp` of Python 3.11's.
RANKS_STAMP = "2a95af4ac93f"


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a rank file in tiktoken's format: base64 and rank.

    tiktoken's own reader would put a copy in its cache under the file's
    path, and go on using it after the file has changed.
    """
    rows = (line.split() for line in path.read_text("ascii").splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def build_encoding(name: str, ranks: Mapping[bytes, int]) -> tiktoken.Encoding:
    """Return the encoding of these ranks, and one special token after them."""
    return tiktoken.Encoding(
        name,
        pat_str=PATTERN,
        mergeable_ranks=dict(ranks),
        special_tokens={END_OF_TEXT: len(ranks)},
        explicit_n_vocab=len(ranks) + 1,
    )


@lru_cache(maxsize=1)
def duet_1k() -> tiktoken.Encoding:
    """Return the tokenizer that comes with the kit: 1,024 tokens."""
    return build_encoding(NAME, read_ranks(RANKS_FILE))


def main(arguments: list[str] | None = None) -> None:
    """Learn merges from a text with tiktoken's trainer; write the rank file.

    Source: Sennrich et al. 2016 (Neural Machine Translation of Rare Words
    with Subword Units), on bytes as GPT-2 does it.
    """
    from tiktoken._educational import bpe_train

    parser = argparse.ArgumentParser(
        prog="python -m shared.tokenization.bpe",
        description="Train the kit's tokenizer, in some six minutes.",
    )
    parser.add_argument(
        "--file", type=Path, help="text; default: Python's documentation"
    )
    parser.add_argument("--out", type=Path, default=RANKS_FILE)
    asked = parser.parse_args(arguments)
    text = default_text() if asked.file is None else read_text(asked.file)
    ranks = bpe_train(text, N_VOCAB - 1, PATTERN, visualise=None)
    build_encoding(NAME, ranks)  # refused where ranks are no numbers in turn
    lines = [f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks.items()]
    write_atomically(asked.out, "".join(lines))
    print(f"{asked.out}: {N_VOCAB} tokens from text {text_stamp(text)}")


if __name__ == "__main__":
    run(main)
