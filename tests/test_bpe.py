"""The byte-pair trainer against tiktoken's own, and the rank file."""

import contextlib
import hashlib
import io
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from shared.console import run
from shared.tokenization import bpe
from shared.tokenization.texts import default_text, text_stamp

SMALL_TEXT = (
    "A long time ago, in a galaxy far, far away: 1977, 1980, 1983!\n\n"
    "Es war einmal ... ein Müller, der war arm; straße, größe, süß.\n"
    "    def far(away):\n        return [away, away, 12.5]\n"
) * 3


@pytest.mark.parametrize("n_ranks", [256, 257, 300, 320])
def test_training_equals_tiktokens_own_trainer(n_ranks):
    theirs = bpe_train(SMALL_TEXT, n_ranks, bpe.PATTERN, visualise=None)
    assert bpe.train_bpe(SMALL_TEXT, n_ranks) == theirs


@given(st.text("ab c1.\n", min_size=2, max_size=60), st.integers(257, 262))
def test_training_equals_the_oracle_on_any_text(text, n_ranks):
    def attempt(train, *arguments):
        try:
            return train(text, n_ranks, *arguments)
        except ValueError:  # the text has no more pairs
            return None

    ours = attempt(bpe.train_bpe)
    theirs = attempt(bpe_train, bpe.PATTERN, None)
    assert (ours is None) == (theirs is None)
    # the oracle gives a token that two pairs can spell a second rank
    if theirs is not None and len(set(theirs.values())) == n_ranks:
        assert ours == theirs
    if ours is not None:
        assert sorted(ours.values()) == list(range(n_ranks))


@pytest.mark.parametrize(
    ("text", "n_ranks", "message"),
    [
        ("a b", 255, "at least 256, got 255"),
        ("ab ab", 300, "after 258 of 300"),
        ("", 257, "after 256 of 257"),
    ],
)
def test_what_cannot_be_trained(text, n_ranks, message):
    with pytest.raises(ValueError, match=message):
        bpe.train_bpe(text, n_ranks)


def test_the_script_refuses_a_file_in_one_line(run_command):
    status, out, err = run_command(partial(run, bpe.main), "", "--file=nope")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "nope" in err


def test_the_script_writes_what_training_gives(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "ranks"
    # a text with enough different pairs for all the merges
    words = (hashlib.sha1(bytes([i])).hexdigest() for i in range(250))
    text.write_text(" ".join(words) + default_text()[:20_000])
    with contextlib.redirect_stderr(io.StringIO()):
        bpe.main(["--file", str(text), "--out", str(out)])
        first = out.read_bytes()
        bpe.main(["--file", str(text), "--out", str(out)])
    assert out.read_bytes() == first
    ranks = bpe.parse_ranks(first.decode())
    assert ranks == bpe.train_bpe(text.read_text(), bpe.N_VOCAB - 1)
    assert {p.name for p in tmp_path.iterdir()} == {"ranks", "text.txt"}
    assert text_stamp(text.read_text()) in capsys.readouterr().out


def test_the_rank_file_is_reproducible():
    text = default_text()
    if text_stamp(text) != bpe.RANKS_STAMP:
        pytest.skip("this Python's documentation is another version's")
    trained = bpe.dump_ranks(bpe.train_bpe(text, bpe.N_VOCAB - 1))
    assert trained == bpe.RANKS_FILE.read_text()
