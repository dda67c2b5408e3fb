"""The kit's own merges, and the script that learned them."""

from functools import partial

import pytest
from tiktoken._educational import bpe_train

from shared.console import run
from shared.tokenization import bpe
from shared.tokenization.texts import default_text, text_stamp


def test_the_script_refuses_a_file_in_one_line(run_command):
    status, out, err = run_command(partial(run, bpe.main), "", "--file=nope")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "nope" in err


def test_the_script_merges_the_most_frequent_pair(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bpe, "N_VOCAB", 260)
    text, out = tmp_path / "text.txt", tmp_path / "ranks"
    text.write_text("abcabc ab")
    bpe.main(["--file", str(text), "--out", str(out)])
    bytes_ = [bytes([b]) for b in range(256)]
    assert [*bpe.read_ranks(out)] == [*bytes_, b"ab", b"abc", b"abcabc"]
    assert [*bpe.read_ranks(out).values()] == [*range(259)]
    assert {p.name for p in tmp_path.iterdir()} == {"ranks", "text.txt"}
    assert text_stamp("abcabc ab") in capsys.readouterr().out


def test_the_rank_file_is_reproducible():
    text = default_text()
    if text_stamp(text) != bpe.RANKS_STAMP:
        pytest.skip("this Python's documentation is another version's")
    # a few merges: all 767 take minutes
    learned = bpe_train(text, 260, bpe.PATTERN, visualise=None)
    kept = bpe.read_ranks(bpe.RANKS_FILE)
    assert [*kept.items()][:260] == [*learned.items()]
