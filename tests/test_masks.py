import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.masks import (
    causal_mask,
    combine_masks,
    padding_mask,
    slice_mask,
    subsequent_mask,
)


@given(st.integers(0, 30))
def test_subsequent_mask_shows_the_past_and_the_present(size):
    mask = subsequent_mask(size)
    assert mask.shape == (1, size, size)
    assert mask.dtype == torch.bool
    for row in range(size):
        for column in range(size):
            assert mask[0, row, column].item() == (column <= row)


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_slice_of_the_causal_mask_is_the_shorter_mask(longest, size):
    mask = causal_mask(longest)
    assert mask.shape == (1, 1, longest, longest)
    if size > longest:
        with pytest.raises(ValueError, match=rf"{longest} .* {size}"):
            slice_mask(mask, size)
    else:
        assert slice_mask(mask, size).equal(causal_mask(size))


def test_masks_are_made_on_the_device_asked_for():
    assert subsequent_mask(3, device="meta").device.type == "meta"
    assert causal_mask(3, device="meta").device.type == "meta"


def test_padding_is_hidden_from_every_position():
    tokens = torch.tensor([[5, 6, 0], [7, 0, 0]])
    mask = padding_mask(tokens, pad=0)
    assert mask.tolist() == [[[True, True, False]], [[True, False, False]]]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1))
def test_a_combination_shows_what_all_masks_show(rows):
    padding = torch.tensor(rows).unsqueeze(1)
    if not padding[:, 0, 0].all():  # position 0 sees itself or nothing
        with pytest.raises(ValueError, match="position 0 of row"):
            combine_masks(subsequent_mask(4), padding)
        return
    mask = combine_masks(subsequent_mask(4), padding)
    assert mask.shape == (len(rows), 4, 4)
    for b, row in enumerate(rows):
        for t in range(4):
            for s in range(4):
                assert mask[b, t, s].item() == (s <= t and row[s])


def test_a_blind_row_is_refused_with_its_place():
    left_padded = padding_mask(torch.tensor([[4, 4], [0, 4]]), pad=0)
    with pytest.raises(
        ValueError, match="position 0 of row 1 has nothing to see"
    ):
        combine_masks(subsequent_mask(2), left_padded)


def test_one_mask_alone_is_its_own_combination():
    assert combine_masks(subsequent_mask(3)).equal(subsequent_mask(3))


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ((), "at least one mask, got 0"),
        ((subsequent_mask(3).to(torch.uint8),), "must be bool"),
        ((causal_mask(3), subsequent_mask(3)), "4 axes"),
        ((subsequent_mask(3), subsequent_mask(4)), "do not fit"),
    ],
)
def test_masks_that_cannot_be_combined_are_refused(masks, message):
    with pytest.raises(ValueError, match=message):
        combine_masks(*masks)
