"""Masks: who is seen, how they are cut, joined and refused."""

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


@given(st.integers(0, 30), st.integers(0, 30))
def test_a_causal_mask_shows_the_past_and_the_present(size, longest):
    mask = subsequent_mask(size)
    assert mask.dtype == torch.bool
    shown = [[s <= t for s in range(size)] for t in range(size)]
    assert mask.equal(torch.tensor(shown, dtype=bool).view(1, size, size))
    assert causal_mask(size).equal(mask[None])
    if size <= longest:
        assert slice_mask(causal_mask(longest), size).equal(causal_mask(size))
        return
    with pytest.raises(
        ValueError, match=f"{longest} positions has no slice for {size}"
    ):
        slice_mask(causal_mask(longest), size)


def test_masks_are_made_on_the_device_asked_for():
    assert subsequent_mask(3, device="meta").device.type == "meta"
    assert causal_mask(3, device="meta").device.type == "meta"


def test_padding_is_hidden_from_every_position():
    tokens = torch.tensor([[5, 8, 6], [7, 6, 6]])
    mask = padding_mask(tokens, pad=6)
    assert mask.tolist() == [[[True, True, False]], [[True, False, False]]]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1))
def test_a_combination_shows_what_all_masks_show(rows):
    causal, padding = subsequent_mask(4), torch.tensor(rows).unsqueeze(1)
    assert combine_masks(causal).equal(causal)
    blind = [b for b, row in enumerate(rows) if not row[0]]
    if blind:  # position 0 sees itself or nothing
        message = f"position 0 of row {blind[0]} has nothing to see"
        with pytest.raises(ValueError, match=message):
            combine_masks(causal, padding)
        return
    mask = combine_masks(causal, padding)
    assert mask.shape == (len(rows), 4, 4)
    for b, row in enumerate(rows):
        for t in range(4):
            for s in range(4):
                assert mask[b, t, s].item() == (s <= t and row[s])


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
