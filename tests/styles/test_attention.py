"""Attention as the paper defines it, compared with loops in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import masked_attention

from gpt_duet.annotated import MultiHeadedAttention, attention
from gpt_duet.masks import (
    causal_mask,
    combine_masks,
    padding_mask,
    slice_mask,
    subsequent_mask,
)
from gpt_duet.testing.strategies import seeds


def randn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@given(
    seed=seeds,
    time=st.integers(1, 6),
    key_time=st.integers(1, 6),
    d_k=st.integers(1, 5),
    d_v=st.integers(1, 5),
    data=st.data(),
)
def test_attention_is_the_formula_under_any_mask(
    seed, time, key_time, d_k, d_v, data
):
    row = st.lists(st.booleans(), min_size=key_time, max_size=key_time).filter(
        any
    )
    visible = data.draw(st.lists(row, min_size=time, max_size=time))
    mask = torch.tensor(visible)
    if data.draw(st.booleans()):  # without a mask, all keys are visible
        visible, mask = np.ones((time, key_time)), None
    query = randn(2, time, d_k, seed=seed)
    key = randn(2, key_time, d_k, seed=seed + 1)
    value = randn(2, key_time, d_v, seed=seed + 2)

    output, p_attn = attention(query, key, value, mask)

    for b in range(2):
        sequence = (x[b].numpy() for x in (query, key, value))
        rows, weights = masked_attention(*sequence, visible)
        np.testing.assert_allclose(output[b], rows, atol=1e-12)
        np.testing.assert_allclose(p_attn[b], weights, atol=1e-12)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_no_score_of_any_dtype_beats_the_mask(dtype):
    largest = torch.finfo(dtype).max ** 0.5 / 2
    query = torch.tensor([[[largest], [largest]]], dtype=dtype)
    key = torch.tensor([[[-largest], [largest]]], dtype=dtype)
    _, p_attn = attention(query, key, key, subsequent_mask(2))
    assert p_attn[0, 0].tolist() == [1.0, 0.0]
    assert p_attn.isfinite().all()


def test_probabilities_are_returned_before_dropout():
    x = randn(2, 5, 4, seed=1)
    dropout = torch.nn.Dropout(0.5)
    output, p_attn = attention(x, x, x, subsequent_mask(5), dropout)
    torch.testing.assert_close(p_attn.sum(-1), torch.ones_like(p_attn[..., 0]))
    assert not torch.allclose(output, p_attn @ x)


def test_query_and_key_may_come_from_different_sequences():
    layer = MultiHeadedAttention(2, 6).double().eval()
    query, memory = randn(3, 2, 6, seed=2), randn(3, 5, 6, seed=3)
    out = layer(query, memory, memory)
    assert out.shape == (3, 2, 6)
    # the order of the memory has no effect, but the content of its values has
    turned = memory.flip(1)
    torch.testing.assert_close(layer(query, turned, turned), out)
    assert not layer(query, memory, memory + 1).allclose(out)


def test_attention_takes_one_mask_for_each_row():
    layer = MultiHeadedAttention(2, 4, dropout=0.0).double()
    x = randn(2, 3, 4, seed=4)
    masks = torch.ones(2, 3, 3, dtype=torch.bool)
    masks[1] = subsequent_mask(3)
    both = layer(x, x, x, masks)
    torch.testing.assert_close(both[:1], layer(x[:1], x[:1], x[:1]))
    alone = layer(x[1:], x[1:], x[1:], subsequent_mask(3))
    torch.testing.assert_close(both[1:], alone)


def test_a_query_that_sees_nothing_gets_nan_and_no_hidden_key():
    layer = MultiHeadedAttention(2, 4, dropout=0.0)
    x = randn(1, 3, 4, seed=4).float()
    mask = subsequent_mask(3).clone()
    mask[0, 1] = False
    found = layer(x, x, x, mask)[0].isnan().all(-1)
    assert found.tolist() == [False, True, False]


def test_probabilities_are_kept_only_when_asked_for():
    layer = MultiHeadedAttention(2, 4)
    x = torch.randn(1, 3, 4)
    layer(x, x, x)
    assert layer.attn is None
    layer.keep_attn = True
    layer(x, x, x, subsequent_mask(3))
    assert not layer.attn.requires_grad
    torch.testing.assert_close(layer.attn.sum(-1), torch.ones(1, 2, 3))


@pytest.mark.parametrize("h", [0, 3, -2])
def test_heads_that_do_not_divide_the_width_are_refused(h):
    with pytest.raises(ValueError, match=f"h={h} heads .* d_model=8"):
        MultiHeadedAttention(h, 8)


def test_score_variance_does_not_grow_with_the_width():
    # the reason why scores are divided by sqrt(d_k)
    query, key = randn(200, 64, seed=5), randn(200, 64, seed=6)
    logits = attention(query, key, torch.eye(200, dtype=torch.float64))[1]
    scores = logits.log() - logits.log().mean(-1, keepdim=True)
    assert 0.8 < scores.var().item() < 1.2


@pytest.mark.unhooked
@pytest.mark.parametrize("shape", [(4, 4), (1, 1, 4, 4), (4,), (3, 4, 4)])
def test_a_mask_that_would_be_broadcast_over_heads_is_refused(shape):
    layer = MultiHeadedAttention(4, 16)
    x = torch.randn(1, 4, 16)
    mask = torch.ones(shape).tril() if len(shape) > 1 else torch.ones(shape)
    with pytest.raises(ValueError, match="a mask is") as caught:
        layer(x, x, x, mask)
    assert str(shape) in str(caught.value)


# Masks: visible positions, slicing, combination and refusals


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
    if blind:  # position 0 sees nothing
        message = f"position 0 of row {blind[0]} sees no position"
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
