"""Texts, their stamps, splits and batches of windows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.tokenization.texts import (
    default_text,
    random_batch,
    read_text,
    split_ids,
    text_stamp,
)


def test_the_default_text_is_a_long_one():
    text = default_text()
    assert len(text) > 100_000
    assert "statement" in text
    assert default_text() == text


def test_a_stamp_tells_texts_apart():
    assert text_stamp("a") == "ca978112ca1b"  # sha256 of one "a"
    assert text_stamp("b") != text_stamp("a")


def test_a_file_is_read_as_it_is(tmp_path):
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
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(file)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        read_text(tmp_path)


# Splits --------------------------------------------------------------------


@given(st.integers(2, 300), st.floats(0.01, 0.99))
def test_a_split_loses_nothing_and_keeps_the_order(count, share):
    ids = torch.arange(count)
    try:
        train, validation = split_ids(ids, share)
    except ValueError:
        assert int(share * count) == 0
        return
    assert torch.cat([train, validation]).equal(ids)
    assert len(train) == math.floor(share * count)
    assert len(validation) >= 1


def test_nine_tenths_and_one_tenth():
    train, validation = split_ids(torch.arange(1_115_394))
    assert (len(train), len(validation)) == (1_003_854, 111_540)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, math.nan])
def test_shares_that_split_nothing(share):
    with pytest.raises(ValueError, match=f"got {share}"):
        split_ids(torch.arange(10), share)


def test_too_short_to_split():
    with pytest.raises(ValueError, match=r"1 tokens .* 0 for training, 1 for"):
        split_ids(torch.arange(1))


# Batches -------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 20))
def test_windows_are_places_of_the_text(batch_size, block_size, extra):
    ids = 3 * torch.arange(block_size + extra)
    x, y = random_batch(ids, batch_size, block_size)
    assert x.shape == y.shape == (batch_size, block_size)
    start = x[:, :1] // 3
    assert x.equal(ids[start + torch.arange(block_size)])
    assert y.equal(x + 3)  # one step on


def test_every_start_is_drawn_and_no_other():
    ids = torch.arange(20)
    x, y = random_batch(ids, 2000, 8)
    assert sorted(set(x[:, 0].tolist())) == list(range(12))
    assert y.max() == 19  # the last token is a target, never an input
    counts = torch.bincount(x[:, 0]).double()
    expected = 2000 / 12
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 11 + 5 * math.sqrt(22)


def test_a_seed_makes_batches_reproducible():
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return random_batch(torch.arange(99), 4, 8, generator)[0].tolist()

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_the_shortest_text_has_one_window():
    x, y = random_batch(torch.arange(9), 2, 8)
    assert x.tolist() == 2 * [list(range(8))]
    assert y.tolist() == 2 * [list(range(1, 9))]


@pytest.mark.parametrize(
    ("batch_size", "block_size", "message"),
    [
        (1, 9, "9 tokens is too short: a window of 9 .* need 10"),
        (0, 8, "batch_size must be at least 1, got 0"),
        (1, 0, "block_size must be at least 1, got 0"),
    ],
)
def test_batches_that_cannot_be(batch_size, block_size, message):
    with pytest.raises(ValueError, match=message):
        random_batch(torch.arange(9), batch_size, block_size)
