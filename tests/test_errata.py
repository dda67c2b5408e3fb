"""The faults of two public tutorials, found in their own listings.

The numbers are those of the table in README.md, which says what is done
here instead and by which test it is held.
"""

import copy

import pytest
import torch
from torch import nn

from shared.masks import subsequent_mask


def dropout_rates(model):
    return {m.p for m in model.modules() if isinstance(m, nn.Dropout)}


def test_the_faults_of_the_first_text_are_its_own(listings):
    names = listings("gpt-from-scratch.md", slice(5))
    config = names["GPT1Config"](10, 12, embed_dim=24, num_head=4)
    assert config.num_heads == 12  # D1-06
    model = names["GPT"](config)
    answer = model(torch.randint(10, (3, 12)), target="no tensor")  # D1-04
    assert answer.shape == (3, 12, 10)
    assert answer.isnan().all()  # D1-01, D1-01b
    shapes = [t.shape[-2:] for t in model.state_dict().values()]
    assert shapes.count((12, 12)) == 12  # D1-05: a mask in every layer


def test_the_faults_of_the_third_text_are_its_own(listings):
    names = listings("architecture-of-gpt-models.md", slice(1, None))
    make_model = names["make_model"]
    tokens, mask = torch.arange(10).view(2, 5), subsequent_mask(5)
    model = make_model(11, N=2, d_model=16, d_ff=32, h=2, dropout=0.0)
    assert dropout_rates(model) == {0.0, 0.1}  # D4-05
    first, second = model.decoder.layers
    assert first.feed_forward.w_1.bias.equal(second.feed_forward.w_1.bias)
    assert first.feed_forward.w_1.bias.any()  # D4-06
    with pytest.raises(TypeError, match="mask"):  # D4-14
        model(tokens)
    model.eval()
    changed = tokens + torch.tensor([0, 0, 0, 0, 1])
    moved = model.decode(changed, None) - model.decode(tokens, None)
    assert moved[:, 0].abs().max() > 1e-3
    model(tokens, mask)
    with pytest.raises(RuntimeError, match="deepcopy"):  # D4-04
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="must match"):  # D4-09
        names["PositionalEncoding"](7, 0.0)
    single = names["PositionalEncoding"](8, 0.0, max_len=1)
    assert single(torch.zeros(2, 3, 8)).shape == (2, 3, 8)
    del names["math"]
    with pytest.raises(NameError, match="math"):  # D4-01
        names["attention"](*torch.zeros(3, 1, 4, 8))
