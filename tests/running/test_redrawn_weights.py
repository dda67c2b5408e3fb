"""Copies with redrawn weights: what changes, and what stays."""

import pytest
import torch
from torch import nn

from gpt_duet.running.variant import redraw_zeros, scale_up, spread_equal


def parameters(**tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        setattr(model, name, nn.Parameter(tensor, tensor.is_floating_point()))
    return model


def redrawn(model, **options):
    redraw_zeros(model, torch.Generator().manual_seed(0), **options)
    return model


def test_zeros_are_redrawn_and_other_numbers_stay():
    model = redrawn(parameters(bias=torch.tensor([0.0, 2.0, 0.0, -3.0])))
    assert model.bias.count_nonzero() == 4
    assert model.bias[1] == 2
    assert model.bias[3] == -3


@pytest.mark.parametrize("columns", [16, 400])
def test_zeros_of_a_matrix_keep_the_size_of_its_products(columns):
    model = redrawn(parameters(weight=torch.zeros(2_000, columns)))
    products = model.weight @ torch.ones(columns)
    assert products.std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_a_redrawn_matrix_keeps_its_root_mean_square(scale):
    weight = torch.randn(200, 100) * scale
    model = redrawn(parameters(weight=weight.clone()), matrices=True)
    assert not (model.weight == weight).any()
    assert model.weight.std().item() == pytest.approx(scale, rel=0.05)


def test_weights_that_training_leaves_alone_stay_zero():
    model = parameters(frozen=torch.zeros(4), hooked=torch.zeros(4))
    model.frozen.requires_grad_(False)
    model.hooked.register_hook(lambda gradient: gradient)
    redrawn(model, matrices=True)
    assert not model.frozen.any()
    assert not model.hooked.any()


def test_a_parameter_without_numbers_is_left_alone():
    model = redrawn(parameters(none=torch.zeros(0, 16)), matrices=True)
    spread_equal(model, torch.Generator())
    scale_up(model, 4.0)
    assert model.none.shape == (0, 16)


def test_equal_numbers_are_spread_between_half_and_all():
    model = parameters(gain=torch.full((1_000,), 2.0), other=torch.arange(3.0))
    spread_equal(model, torch.Generator().manual_seed(0))
    assert 1 <= model.gain.min() < 1.1
    assert 1.9 < model.gain.max() <= 2
    assert torch.equal(model.other, torch.arange(3.0))


def test_matrices_are_scaled_up_and_tables_stay():
    model = parameters(weight=torch.full((9, 4), 0.5), gain=torch.ones(4))
    model.table = nn.Embedding(5, 4)
    table = model.table.weight.clone()
    scale_up(model, 4.0)
    size = float(model.weight.detach().square().sum()) / 9
    assert size**0.5 == pytest.approx(4)
    assert torch.equal(model.table.weight, table)
    assert torch.equal(model.gain, torch.ones(4))
