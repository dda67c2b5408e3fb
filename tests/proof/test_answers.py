"""Cached answers of rules, and fast paths of rules.

An answer is cached only if the rule read no value that may vary.
"""

import pytest
import torch

from gpt_duet.proof import engine, rules
from gpt_duet.proof.call import RULES
from gpt_duet.proof.codes import CODES, FREE, KNOWN
from gpt_duet.proof.engine import FALLING_ROWS, POSITIONS, RISING_ROWS
from gpt_duet.proof.leaving import codes_carried
from gpt_duet.proof.shadows import Shadows

TIME = 6


def positions(tensor, axis):
    """Return codes for a tensor: the position of each entry along an axis."""
    shape = [1] * tensor.dim()
    shape[axis] = tensor.size(axis)
    return torch.arange(tensor.size(axis), dtype=CODES).view(shape)


def codes_of(function, tensors, codes, answers=None):
    """Return the codes of a function's result, and the Shadows it ran with."""
    shadows = Shadows(answers=answers)
    for tensor, code in zip(tensors, codes, strict=True):
        shadows.mark(tensor, code)
    with torch.no_grad(), codes_carried(shadows):
        result = function(*tensors)
    return shadows.codes(result).expand(result.shape), shadows


def masked(x):
    later = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    return (x @ x.mT).masked_fill(later, -torch.inf).softmax(-1) @ x


def masked_by_a_sum(x):
    later = torch.full((TIME, TIME), -torch.inf).triu(1)
    return ((x @ x.mT) + later).softmax(-1) @ x


def attended(x):
    return torch.nn.functional.scaled_dot_product_attention(
        x, x, x, is_causal=True
    )


def gated(x):
    return x * torch.tensor([0.0, 1.0]) + torch.nn.functional.gelu(x)


def in_place(x):
    y = x.clone()
    y[:, 0] += 1
    return y.mul_(2).cumsum(0)


CALLS = [masked, masked_by_a_sum, attended, gated, in_place]


@pytest.mark.parametrize("function", CALLS)
def test_a_cached_answer_equals_that_of_the_rule(function):
    answers = {}
    for seed in range(3):
        x = torch.randn(1, 1, TIME, 2, generator=torch.manual_seed(seed))
        x = x if function in (attended,) else x[0, 0]
        codes = [positions(x, -2)]
        asked, plain = codes_of(function, [x], codes)
        found, shadows = codes_of(function, [x], codes, answers)
        assert torch.equal(found, asked)
        assert shadows.path == plain.path
        assert shadows.notes == plain.notes
    assert any(answer is not None for answer in answers.values())


def test_other_codes_or_known_numbers_get_other_answers():
    answers, x = {}, torch.randn(TIME, TIME)
    mask = torch.zeros(TIME, TIME)
    for size in (0, 1, 3):
        mask = torch.full((TIME, TIME), -torch.inf).triu(size)
        for axis in (0, 1):

            def function(x, mask=mask):
                return (x + mask).softmax(-1)

            codes = [positions(x, axis)]
            asked, _ = codes_of(function, [x], codes)
            found, _ = codes_of(function, [x], codes, answers)
            assert torch.equal(found, asked)


@pytest.mark.parametrize(
    "read",
    [
        lambda call: call.value("self"),
        lambda call: call["self"],
        lambda call: call.result(),
        lambda call: call.out,
    ],
)
def test_answers_from_varying_numbers_are_not_cached(read, monkeypatch):
    def of_the_first_number(call):
        call.codes("self")
        small = bool(read(call).flatten()[0] < 0)
        return torch.full((1, 1), KNOWN if small else TIME, dtype=CODES)

    monkeypatch.setitem(RULES, "tanh", of_the_first_number)
    answers, x = {}, torch.ones(TIME, 2)
    for sign, expected in ((1, TIME), (-1, KNOWN), (1, TIME)):
        found, _ = codes_of(torch.tanh, [sign * x], [positions(x, 0)], answers)
        assert int(found.max()) == expected
    assert set(answers.values()) == {None}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_attention_has_the_codes_of_its_formula(causal, seed, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, 2, TIME, 4) for _ in range(3)]
    codes = []
    # codes of random shapes: along some axes, all entries share a code
    for tensor in tensors:
        shape = [
            n if torch.rand((), generator=generator) < 0.5 else 1
            for n in tensor.shape
        ]
        code = torch.randint(FREE, TIME, shape, generator=generator)
        codes.append(code.to(CODES))

    def function(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal
        )

    found, _ = codes_of(function, tensors, codes)
    for name in rules.SDPA:
        monkeypatch.delitem(RULES, name)
    by_formula, shadows = codes_of(function, tensors, codes)
    assert not shadows.notes.unknown
    assert torch.equal(found, by_formula)


def test_orders_that_change_the_same_rows_share_a_turn():
    def turns(*orders):
        each = [order.codes(3, TIME) for order in orders]
        return engine._turns(each, (0,))

    # 3 rows, each changed to ordinary tokens and to a special one
    assert len(turns(RISING_ROWS)) == 6
    both = turns(RISING_ROWS, FALLING_ROWS)
    assert len(both) == 6
    assert [turn.codes for turn in both][::2] == [
        [(0, 0), (1, 2)],
        [(0, 1), (1, 1)],
        [(0, 2), (1, 0)],
    ]
    assert len(turns(POSITIONS)) == 2 * TIME
