"""Texts, their stamps, splits and batches of windows."""

import math

import pytest
import torch
from hypothesis import example, given
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
        ("a folder", "cannot read"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
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
def test_windows_are_places_of_the_text(batch_size, block_size, extra):
    ids = 3 * torch.arange(block_size + extra)
    (x, y), (again, _) = (
        random_batch(ids, batch_size, block_size, drawing)
        for drawing in (torch.Generator().manual_seed(7) for _ in range(2))
    )
    assert again.equal(x)
    assert x.shape == y.shape == (batch_size, block_size)
    start = x[:, :1] // 3
    assert x.equal(ids[start + torch.arange(block_size)])
    assert y.equal(x + 3)  # one step on


def test_every_start_is_drawn_and_no_other():
    x, y = random_batch(torch.arange(20), 2000, 8)
    assert sorted(set(x[:, 0].tolist())) == list(range(12))
    assert y.max() == 19  # the last token is a target, never an input
    expected = 2000 / 12
    counts = torch.bincount(x[:, 0]).double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 11 + 5 * math.sqrt(22)


def test_a_text_without_a_window_has_no_batch():
    message = "9 tokens is too short: a window of 9 .* need 10"
    with pytest.raises(ValueError, match=message):
        random_batch(torch.arange(9), 1, 9)
