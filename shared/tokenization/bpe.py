"""The kit's own tokenizer: byte-pair merges, trained on a text.

`python -m gpt_duet.tokenization.bpe` trains it again; its --help says how.
"""

import argparse
import base64
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import regex
import tiktoken

from ..console import run
from ..files import write_atomically
from ..validation import whole_number
from .texts import default_text, read_text, text_stamp

N_VOCAB = 1024

# Merges never cross the borders of these pieces: a word with the space before
# it; one digit; a run of punctuation; a run of spaces, up to the space that
# begins a word.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

RANKS_FILE = Path(__file__).with_name("duet_1k.tiktoken")
# The `text_stamp` of the text that trained RANKS_FILE: Python 3.11's default.
RANKS_STAMP = "2a95af4ac93f"

Pair = tuple[bytes, bytes]


def train_bpe(text: str, n_ranks: int) -> dict[bytes, int]:
    """Merge the most frequent pair of neighbouring tokens, again and again.

    Of equally frequent pairs, the first one in the text is merged.

    Args:
        text: the text from which merges are learned.
        n_ranks: number of tokens, including the 256 bytes.

    Returns:
        The rank of every token, by the token's bytes. The rank is the id.

    Raises:
        ValueError: for fewer than 256 ranks, or a text with too few pairs.

    Source: Sennrich et al. 2016 (Neural Machine Translation of Rare Words
    with Subword Units), on bytes as GPT-2 does it.
    """
    whole_number("n_ranks", n_ranks, at_least=256)
    ranks = {bytes([b]): b for b in range(256)}
    # A dictionary keeps the order of the text, which decides ties.
    pieces = Counter(regex.findall(PATTERN, text))
    counts = list(pieces.values())
    words = [
        [bytes([b]) for b in piece.encode(errors="replace")]
        for piece in pieces
    ]
    frequency: Counter[Pair] = Counter()
    for word, count in zip(words, counts, strict=True):
        for pair in pairwise(word):
            frequency[pair] += count
    while len(ranks) < n_ranks:
        most = max(frequency.values(), default=0)
        if most == 0:
            raise ValueError(
                f"the text has no more pairs to merge after {len(ranks)} of "
                f"{n_ranks} tokens"
            )
        every = (pair for word in words for pair in pairwise(word))
        best = next(pair for pair in every if frequency[pair] == most)
        # Two different pairs can spell one token: it keeps its first rank.
        ranks.setdefault(best[0] + best[1], len(ranks))
        for i, (word, count) in enumerate(zip(words, counts, strict=True)):
            if best[0] in word and best in pairwise(word):
                words[i] = _joined(word, best)
                for pair in pairwise(word):
                    frequency[pair] -= count
                for pair in pairwise(words[i]):
                    frequency[pair] += count
    return ranks


def _joined(word: list[bytes], pair: Pair) -> list[bytes]:
    """Join a pair of tokens wherever a word has it, from left to right."""
    joined, i = [], 0
    while i < len(word):
        step = 2 if tuple(word[i : i + 2]) == pair else 1
        joined.append(b"".join(word[i : i + step]))
        i += step
    return joined


def dump_ranks(ranks: Mapping[bytes, int]) -> str:
    """Return the ranks in tiktoken's format: base64 of bytes, rank."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    lines = [f"{base64.b64encode(t).decode()} {rank}" for t, rank in ordered]
    return "\n".join(lines) + "\n"


def parse_ranks(content: str) -> dict[bytes, int]:
    """Read the output of `dump_ranks`.

    tiktoken's own reader would cache the file by its path. It would use the
    cached copy even after the file has changed.
    """
    rows = (line.split() for line in content.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in rows}


@lru_cache(maxsize=1)
def duet_1k() -> tiktoken.Encoding:
    """Return the tokenizer that comes with the kit: 1,024 tokens."""
    return tiktoken.Encoding(
        "duet-1k",
        pat_str=PATTERN,
        mergeable_ranks=parse_ranks(RANKS_FILE.read_text("ascii")),
        special_tokens={"<|endoftext|>": N_VOCAB - 1},
        explicit_n_vocab=N_VOCAB,
    )


def main(arguments: list[str] | None = None) -> None:
    """Train on a text and write the rank file."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt_duet.tokenization.bpe",
        description="Train the kit's tokenizer.",
    )
    parser.add_argument(
        "--file", type=Path, help="text; default: Python's documentation"
    )
    parser.add_argument("--out", type=Path, default=RANKS_FILE)
    options = parser.parse_args(arguments)
    text = default_text() if options.file is None else read_text(options.file)
    write_atomically(options.out, dump_ranks(train_bpe(text, N_VOCAB - 1)))
    print(f"{options.out}: {N_VOCAB} tokens from text {text_stamp(text)}")


if __name__ == "__main__":
    run(main)
