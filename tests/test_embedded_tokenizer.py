"""The kit's own tokenizer: trained here, round trips, and what is cached."""

import contextlib
import hashlib
import io
import socket

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken._educational import SimpleBytePairEncoding, bpe_train

from shared import load_tokenizer
from shared.tokenization import bpe, tiktoken_cache
from shared.tokenization.texts import default_text, text_stamp

SMALL_TEXT = (
    "A long time ago, in a galaxy far, far away: 1977, 1980, 1983!\n\n"
    "Es war einmal ... ein Müller, der war arm; straße, größe, süß.\n"
    "    def far(away):\n        return [away, away, 12.5]\n"
) * 3


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_arguments, **_named):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# Training ------------------------------------------------------------------


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


def test_what_cannot_be_trained():
    with pytest.raises(ValueError, match="at least 256, got 255"):
        bpe.train_bpe("a b", 255)
    with pytest.raises(ValueError, match="after 258 of 300"):
        bpe.train_bpe("ab ab", 300)
    with pytest.raises(ValueError, match="after 256 of 257"):
        bpe.train_bpe("", 257)


def test_the_script_writes_what_training_gives(tmp_path, capsys):
    text = tmp_path / "text.txt"
    # a text with enough different pairs for all the merges
    words = (hashlib.sha1(bytes([i])).hexdigest() for i in range(250))
    text.write_text(" ".join(words) + default_text()[:20_000])
    out = tmp_path / "ranks"
    with contextlib.redirect_stderr(io.StringIO()):
        bpe.main(["--file", str(text), "--out", str(out)])
        first = out.read_bytes()
        bpe.main(["--file", str(text), "--out", str(out)])
    assert out.read_bytes() == first
    ranks = bpe.parse_ranks(first.decode())
    assert ranks == bpe.train_bpe(text.read_text(), bpe.N_VOCAB - 1)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "ranks",
        "text.txt",
    ]
    assert text_stamp(text.read_text()) in capsys.readouterr().out


def test_the_rank_file_is_reproducible():
    text = default_text()
    if text_stamp(text) != bpe.RANKS_STAMP:
        pytest.skip("this Python's documentation is another version's")
    trained = bpe.dump_ranks(bpe.train_bpe(text, bpe.N_VOCAB - 1))
    assert trained == bpe.RANKS_FILE.read_text()


# The encoding --------------------------------------------------------------


def test_it_is_a_tiktoken_encoding_of_1024_tokens():
    encoding = bpe.duet_1k()
    assert isinstance(encoding, tiktoken.Encoding)
    assert encoding.name == "duet-1k"
    assert encoding.n_vocab == load_tokenizer("duet-1k").n_vocab == 1024
    assert encoding.encode_single_token("<|endoftext|>") == 1023
    every = [encoding.decode_single_token_bytes(i) for i in range(1024)]
    assert len(set(every)) == 1024
    assert every[:256] == [bytes([b]) for b in range(256)]


def test_it_shortens_the_text_it_was_trained_on():
    text = default_text()
    ids = load_tokenizer("duet-1k").encode(text)
    assert len(ids) < len(text.encode()) / 2
    assert load_tokenizer("duet-1k").decode(ids) == text


def test_it_encodes_as_tiktokens_educational_encoder_does():
    ranks = bpe.parse_ranks(bpe.RANKS_FILE.read_text())
    oracle = SimpleBytePairEncoding(pat_str=bpe.PATTERN, mergeable_ranks=ranks)
    ids = load_tokenizer("duet-1k").encode(SMALL_TEXT)
    assert ids == oracle.encode(SMALL_TEXT, visualise=None)


@given(st.text())
def test_any_text_round_trips(text):
    for name in ("duet-1k", "bytes"):
        tokenizer = load_tokenizer(name)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.n_vocab for i in ids)


def test_any_text_round_trips_in_r50k_base(r50k_base):
    @given(st.text())
    def round_trip(text):
        ids = r50k_base.encode(text)
        assert r50k_base.decode(ids) == text
        assert 50256 not in ids

    round_trip()


@given(st.text(max_size=5), st.text(max_size=5))
def test_special_text_is_ordinary_text(before, after):
    text = f"{before}<|endoftext|>{after}"
    tokenizer = load_tokenizer("duet-1k")
    ids = tokenizer.encode(text)
    assert 1023 not in ids
    assert tokenizer.decode(ids) == text


def test_ids_outside_are_refused():
    with pytest.raises(ValueError, match=r"id 1024 .*1024"):
        load_tokenizer("duet-1k").decode([1024])


# What works here and now ---------------------------------------------------


@pytest.fixture
def nothing_loaded(monkeypatch):
    tiktoken.list_encoding_names()
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})


@pytest.fixture
def cache(tmp_path, monkeypatch, nothing_loaded):
    """An empty cache, and a way to put one of a test's files in it."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def add_encoding(monkeypatch, url, sha256):
    from tiktoken.load import load_tiktoken_bpe

    def constructor():
        return {
            "name": "tiny",
            "pat_str": ".",
            "mergeable_ranks": load_tiktoken_bpe(url, expected_hash=sha256),
            "special_tokens": {"<|end|>": 7},
        }

    known = tiktoken.registry.ENCODING_CONSTRUCTORS
    changed = {**known, "tiny": constructor}
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", changed)


def test_nothing_is_cached_in_an_empty_folder(cache, no_network):
    for name in tiktoken.list_encoding_names():
        found = tiktoken_cache.look_up(name)
        assert not found.works
        assert found.n_vocab is None
        assert str(cache) in found.note
    assert list(cache.iterdir()) == []


def test_a_cached_file_is_found_by_tiktokens_own_name(
    cache, monkeypatch, no_network
):
    url = "https://example.invalid/tiny.tiktoken"
    data = b"YQ== 0\nYg== 1\n"
    add_encoding(monkeypatch, url, hashlib.sha256(data).hexdigest())
    assert not tiktoken_cache.look_up("tiny").works
    file = cache / hashlib.sha1(url.encode()).hexdigest()
    file.write_bytes(data)
    found = tiktoken_cache.look_up("tiny")
    assert found.works
    assert found.n_vocab == 8
    # tiktoken agrees: it loads from the same file, without the network
    assert tiktoken.get_encoding("tiny").n_vocab == 8
    assert tiktoken_cache.look_up("tiny").note == "tiktoken, loaded"


def test_a_damaged_file_is_named_and_left_alone(
    cache, monkeypatch, no_network
):
    url = "https://example.invalid/tiny.tiktoken"
    add_encoding(monkeypatch, url, "0" * 64)
    file = cache / hashlib.sha1(url.encode()).hexdigest()
    file.write_bytes(b"YQ== 0\n")
    found = tiktoken_cache.look_up("tiny")
    assert not found.works
    assert "damaged" in found.note
    assert file.exists()


def test_a_plugins_own_file_needs_no_cache(
    cache, tmp_path, monkeypatch, no_network
):
    file = tmp_path / "ranks"
    file.write_bytes(b"YQ== 0\n")
    add_encoding(monkeypatch, str(file), None)
    assert tiktoken_cache.look_up("tiny").works


def test_a_plugin_that_fails_is_named(monkeypatch, nothing_loaded):
    def constructor():
        raise KeyError("no such thing")

    known = tiktoken.registry.ENCODING_CONSTRUCTORS
    changed = {**known, "tiny": constructor}
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", changed)
    found = tiktoken_cache.look_up("tiny")
    assert not found.works
    assert "no such thing" in found.note


def test_tiktokens_reader_is_put_back(cache):
    reader = tiktoken.load.read_file_cached
    tiktoken_cache.look_up("r50k_base")
    assert tiktoken.load.read_file_cached is reader


def test_where_the_cache_is(monkeypatch):
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", "/somewhere")
    assert str(tiktoken_cache.cache_folder()) == "/somewhere"
    monkeypatch.delenv("DATA_GYM_CACHE_DIR")
    assert tiktoken_cache.cache_folder().name == "data-gym-cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert tiktoken_cache.cache_folder() is None


def test_a_cache_that_is_switched_off(monkeypatch, nothing_loaded, no_network):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert "switched off" in tiktoken_cache.look_up("r50k_base").note
