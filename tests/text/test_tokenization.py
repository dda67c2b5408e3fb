"""Text to ids and back: bytes, characters, the kit's tokenizer, tiktoken's."""

import math
from functools import partial

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from gpt_duet import load_tokenizer
from gpt_duet.console import run
from gpt_duet.tokenization import bpe
from gpt_duet.tokenization.texts import (
    default_text,
    random_batch,
    read_text,
    split_ids,
    text_stamp,
)
from gpt_duet.tokenization.tokenizers import CharTokenizer

NOTES = "\U0001f3b5"  # several tokens in each vocabulary


@pytest.fixture(scope="module", params=["bytes", "duet-1k", "r50k_base"])
def tokenizer(request):
    if request.param == "r50k_base":
        return request.getfixturevalue("r50k_base")
    return load_tokenizer(request.param)


@given(text=st.text())
@example(text=NOTES)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.n_vocab for i in ids)
    assert tokenizer.decode(ids) == text
    # a token may be a part of a character
    parts = [tokenizer.decode_bytes([i]) for i in ids]
    assert b"".join(parts) == text.encode()
    assert text != NOTES or len(parts) > 1


@given(before=st.text(max_size=5), after=st.text(max_size=5))
def test_special_text_is_ordinary_text(tokenizer, before, after):
    text = f"{before}<|endoftext|>{after}"
    ids = tokenizer.encode(text)
    assert tokenizer.n_vocab - 1 not in ids  # UTF-8 has no byte 255
    assert tokenizer.decode(ids) == text


@given(st.text(min_size=1))
def test_characters_round_trip(text):
    tokenizer = load_tokenizer("char", text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.n_vocab == len(set(text))
    assert sorted(text) == [tokenizer.characters[i] for i in sorted(ids)]


def test_each_tokenizer_has_the_expected_ids():
    assert load_tokenizer("char", "hello").encode("ehlo") == [0, 1, 2, 3]
    assert load_tokenizer("bytes").encode("é") == [0xC3, 0xA9]
    assert load_tokenizer("bytes").decode([0xC3]) == "\ufffd"


@pytest.mark.unhooked
def test_ids_of_any_type_but_within_the_vocabulary(tokenizer):
    for each in (tokenizer, CharTokenizer("ab")):
        expected = each.decode([1, 0])
        assert each.decode(np.array([1, 0])) == expected
        assert each.decode(torch.tensor([1, 0])) == expected
        with pytest.raises(TypeError):
            each.decode([0.5])
        for wrong in (-1, each.n_vocab):
            message = f"id {wrong} .* {each.n_vocab}"
            with pytest.raises(ValueError, match=message):
                each.decode([0, wrong])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("char", None, "requires a text"),
        ("char", "", "requires a text"),
        ("nope", None, "'nope'; known: duet-1k, bytes, char,"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused(name, text, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(name, text)


def test_characters_that_are_not_known_are_named():
    message = r"2 characters .* 3 known .* 'd' 'é'"
    with pytest.raises(ValueError, match=message):
        load_tokenizer("char", "abc").encode("badé")


def test_the_kits_own_is_a_tiktoken_encoding_of_1024_tokens():
    encoding = bpe.duet_1k()
    assert isinstance(encoding, tiktoken.Encoding)
    assert encoding.name == "duet-1k"
    assert encoding.n_vocab == load_tokenizer("duet-1k").n_vocab == 1024
    assert encoding.encode_single_token("<|endoftext|>") == 1023
    every = [encoding.decode_single_token_bytes(i) for i in range(1024)]
    assert len(set(every)) == 1024
    assert every[:256] == [bytes([b]) for b in range(256)]
    # the tokenizer compresses its training text
    text = default_text()
    ids = load_tokenizer("duet-1k").encode(text)
    assert len(ids) < len(text.encode()) / 2
    assert load_tokenizer("duet-1k").decode(ids) == text


def test_an_encoding_that_cannot_be_fetched_is_one_sentence(
    monkeypatch, empty_cache
):
    def no_network(_path):
        raise ConnectionError("a long story\nover two lines")

    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    with pytest.raises(ValueError, match="p50k_base") as caught:
        load_tokenizer("p50k_base")
    message = str(caught.value)
    for part in ("TIKTOKEN_CACHE_DIR", str(empty_cache), "bytes or char"):
        assert part in message
    assert "\n" not in message


# Texts, their hashes, splits and batches of windows


def test_texts_are_long_hashed_and_read_unchanged(tmp_path):
    text = default_text()
    assert len(text) > 100_000
    assert "statement" in text
    assert text_stamp("a") == "ca978112ca1b"  # sha256 of one "a"
    file = tmp_path / "text"
    file.write_bytes("\ufeffä\r\nb\n".encode())
    assert read_text(file) == "ä\r\nb\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"ab\xff", "not UTF-8 text: byte 0xff at offset 2"),
        (b"ab\0", "zero byte at offset 2"),
        (None, "cannot read .*No such file"),
        ("a folder", "cannot read"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, message):
    file = tmp_path / "text"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        file.mkdir()
    with pytest.raises(ValueError, match=message):
        read_text(file)


@given(st.integers(2, 300))
def test_a_split_loses_nothing_and_keeps_the_order(count):
    ids = torch.arange(count)
    train, validation = split_ids(ids)
    assert torch.cat([train, validation]).equal(ids)
    assert len(train) == count * 9 // 10


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 20))
@example(2, 8, 1)  # the shortest text has one window
def test_windows_are_slices_of_the_text(batch_size, block_size, extra):
    ids = 3 * torch.arange(block_size + extra)
    (x, y), (again, _) = (
        random_batch(ids, batch_size, block_size, drawing)
        for drawing in (torch.Generator().manual_seed(7) for _ in range(2))
    )
    assert again.equal(x)
    assert x.shape == y.shape == (batch_size, block_size)
    start = x[:, :1] // 3
    assert x.equal(ids[start + torch.arange(block_size)])
    assert y.equal(x + 3)  # shifted by one


def test_every_valid_start_is_drawn():
    x, y = random_batch(torch.arange(20), 2000, 8)
    assert sorted(set(x[:, 0].tolist())) == list(range(12))
    assert y.max() == 19  # the last token is not an input
    expected = 2000 / 12
    counts = torch.bincount(x[:, 0]).double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 11 + 5 * math.sqrt(22)


def test_a_text_without_a_window_has_no_batch():
    message = "9 tokens is too short: a window of 9 .* require 10"
    with pytest.raises(ValueError, match=message):
        random_batch(torch.arange(9), 1, 9)


# The byte-pair trainer compared with tiktoken's, and the rank file


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
    # if two pairs spell one token, the oracle gives this token two ranks
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
def test_a_text_with_too_few_pairs_is_refused(text, n_ranks, message):
    with pytest.raises(ValueError, match=message):
        bpe.train_bpe(text, n_ranks)


def test_the_script_refuses_a_file_in_one_line(run_command):
    status, out, err = run_command(partial(run, bpe.main), "", "--file=nope")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "nope" in err


def test_the_script_writes_what_training_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bpe, "N_VOCAB", 260)
    text, out = tmp_path / "text.txt", tmp_path / "ranks"
    text.write_text("abcabc ab")
    bpe.main(["--file", str(text), "--out", str(out)])
    ranks = bpe.parse_ranks(out.read_text())
    assert ranks == bpe.train_bpe("abcabc ab", 259)
    assert [*ranks][256:] == [b"ab", b"abc", b"abcabc"]
    assert {p.name for p in tmp_path.iterdir()} == {"ranks", "text.txt"}
    assert text_stamp("abcabc ab") in capsys.readouterr().out


def test_the_rank_file_is_reproducible():
    text = default_text()
    if text_stamp(text) != bpe.RANKS_STAMP:
        pytest.skip("this Python's documentation is another version's")
    trained = bpe.dump_ranks(bpe.train_bpe(text, bpe.N_VOCAB - 1))
    assert trained == bpe.RANKS_FILE.read_text()
