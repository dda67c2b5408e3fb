import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared import load_tokenizer
from shared.tokenization import ByteTokenizer, CharTokenizer

texts = st.text(st.characters(exclude_categories=["Cs"]))
special = "<|endoftext|>"


@given(texts)
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert bytes(ids) == text.encode()


@given(texts.filter(bool))
def test_char_round_trip(text):
    tokenizer = load_tokenizer("char", text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.n_vocab == len(set(text))
    assert sorted(text) == [tokenizer.characters[i] for i in sorted(ids)]


def test_char_ids_are_in_sorted_order():
    assert load_tokenizer("char", "hello").encode("ehlo") == [0, 1, 2, 3]


def test_char_names_what_it_does_not_know():
    tokenizer = load_tokenizer("char", "abc")
    with pytest.raises(
        ValueError, match=r"2 characters .* 3 known .* 'd' 'é'"
    ):
        tokenizer.encode("badé")


@pytest.mark.parametrize("text", [None, ""])
def test_char_needs_a_text(text):
    with pytest.raises(ValueError, match="needs a text"):
        load_tokenizer("char", text)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab")])
def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    n_vocab = tokenizer.n_vocab
    for wrong in (-1, n_vocab):
        with pytest.raises(ValueError, match=f"id {wrong} .* {n_vocab}"):
            tokenizer.decode([0, wrong])


def test_half_a_character_is_shown_as_replacement():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'nope'; known: duet-1k, bytes, char,"
    ):
        load_tokenizer("nope")


class TestTiktoken:
    @given(text=texts)
    def test_round_trip(self, text):
        tokenizer = TestTiktoken.tokenizer
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.fixture(autouse=True)
    def _load(self, r50k_base):
        TestTiktoken.tokenizer = r50k_base

    def test_the_text_of_the_article(self):
        tokenizer = load_tokenizer("davinci")
        ids = tokenizer.encode("A long time ago")
        assert ids == [32, 890, 640, 2084]
        assert tokenizer.n_vocab == 50257
        assert tokenizer.encode("she") == [7091]
        assert tokenizer.encode(" she") == [673]

    def test_special_tokens_are_ordinary_text(self):
        ids = self.tokenizer.encode(special)
        assert len(ids) > 1
        assert self.tokenizer.decode(ids) == special

    def test_a_token_may_be_part_of_a_character(self):
        ids = self.tokenizer.encode("\U0001f3b5")
        parts = [self.tokenizer.decode_bytes([i]) for i in ids]
        assert len(parts) > 1
        assert b"".join(parts).decode() == "\U0001f3b5"

    def test_ids_outside_the_vocabulary_are_refused(self):
        with pytest.raises(ValueError, match=r"id 50257 .* 50257"):
            self.tokenizer.decode([50257])


def test_an_encoding_that_cannot_be_fetched(monkeypatch, tmp_path):
    import tiktoken.load
    import tiktoken.registry

    def no_network(_path):
        raise ConnectionError("a long story\nover two lines")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(ValueError, match="p50k_base") as caught:
        load_tokenizer("p50k_base")
    message = str(caught.value)
    assert "TIKTOKEN_CACHE_DIR" in message
    assert str(tmp_path) in message
    assert "bytes or char" in message
    assert "\n" not in message


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab")])
@pytest.mark.unhooked
def test_ids_may_come_in_arrays_and_tensors(tokenizer):
    expected = tokenizer.decode([1, 0])
    assert tokenizer.decode(np.array([1, 0])) == expected
    assert tokenizer.decode(torch.tensor([1, 0])) == expected
    with pytest.raises(TypeError):
        tokenizer.decode([0.5])
