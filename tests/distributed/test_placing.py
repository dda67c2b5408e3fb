"""A rank's tensor is found in the tensor of which it is a part."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

from gpt_duet.distributed.placing import Placed, Whole, as_runs, find
from gpt_duet.running.tolerances import PLACED_UNITS, PLACED_UNITS_OF_FLOAT64

EPS, EPS_OF_FLOAT64 = (
    torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)
)


def whole_of(tensor, eps=EPS, number=0, op="mul"):
    return Whole(number, f"value {number}", op, tensor.double(), eps)


@st.composite
def cuts(draw):
    """Draw a tensor of different numbers, and the indices of a part of it."""
    shape = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    order = torch.randperm(count, generator=generator)
    picked = tuple(
        tuple(draw(st.lists(st.integers(0, n - 1), min_size=2, unique=True)))
        for n in shape
    )
    last, numel = len(picked[-1]), math.prod(map(len, picked))
    assume(last == shape[-1] or count % numel == 0)  # others are not searched
    return order.view(shape).double() / count - 0.5, picked


@given(cuts())
def test_a_part_is_found_where_it_was_cut(cut):
    tensor, picked = cut
    whole = whole_of(tensor)
    part = Placed(whole, picked).part_of(tensor)
    found = find(part, "mul", [whole])
    assert found is not None
    assert found.picked == picked
    if any([*indices] != sorted(indices) for indices in picked):
        assert found.kind == "another order"
    else:
        assert found.kind == ("whole" if part.equal(tensor) else "sliced")


@given(
    cuts(),
    st.sampled_from(
        [(EPS, PLACED_UNITS), (EPS_OF_FLOAT64, PLACED_UNITS_OF_FLOAT64)]
    ),
)
def test_a_part_may_differ_by_rounding_only(cut, precision):
    tensor, picked = cut
    eps, units = precision
    whole = whole_of(tensor, eps)
    part = Placed(whole, picked).part_of(tensor)
    bound = units * eps * tensor.abs().max()
    assert find(part + 0.9 * bound, "mul", [whole]) is not None
    assert find(part + 1.1 * bound, "mul", [whole]) is None


@given(cuts())
def test_repeated_rows_are_placed_by_their_neighbours(cut):
    tensor, _ = cut
    tensor[0] = 0.0
    found = find(tensor, "mul", [whole_of(tensor)])
    assert str(found) == "all"
    assert found.kind == "whole"


def test_other_numbers_are_found_nowhere():
    tensor = torch.arange(12.0).view(3, 4)
    assert find(tensor[:2] + 0.5, "mul", [whole_of(tensor)]) is None
    assert find(tensor.repeat(2, 1), "mul", [whole_of(tensor)]) is None
    nothing = torch.full((3, 4), torch.nan)
    assert find(nothing, "mul", [whole_of(tensor)]) is None


def test_of_equal_wholes_that_of_the_same_operation_is_found():
    tensor = torch.arange(12.0).view(3, 4)
    wholes = [
        whole_of(torch.cat([tensor, tensor]), number=0),
        whole_of(tensor, number=1, op="add"),
        whole_of(tensor, number=2),
    ]
    for op, number in (("mul", 2), ("add", 1), ("sub", 1)):
        assert find(tensor[1:], op, wholes).of.number == number


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ((0, 1, 2, 3, 12, 13), "0-3, 12-13"),
        ((5,), "5"),
        ((3, 2, 1), "3, 2, 1"),
        ((0, 2, 4, 6, 8), "0, 2, 4, 6, ..."),
    ],
)
def test_indices_are_named_as_runs(indices, text):
    assert as_runs(indices) == text


def test_a_part_is_named_by_the_axes_that_it_cuts():
    whole = whole_of(torch.arange(24.0).view(4, 6))
    part = Placed(whole, ((0, 1, 2, 3), (4, 5)))
    assert str(part) == "4-5 of axis 1"
    assert str(Placed(whole, ((1,), (0,)))) == "1 of axis 0 and 0 of axis 1"
