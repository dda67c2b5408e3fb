"""Every broken model is broken, every correct one is not: measured."""

from collections import Counter

import pytest
from broken_models import BROKEN
from correct_models import CORRECT
from measurements import MEASUREMENTS

CHECKS = {
    "check_shape",
    "check_finite",
    "check_causality",
    "check_causal_gradients",
    "check_prefix_consistency",
    "check_batch_independence",
    "check_order_sensitivity",
    "check_context_use",
    "check_determinism",
    "check_purity",
    "check_normalised",
    "check_initial_loss",
    "check_loss",
    "check_gradient_flow",
    "check_state_dict",
    "check_dtype",
    "check_length_limit",
    "check_vocabulary",
    "check_cache",
    "check_entropy_bound",
}
SLOW = "check_entropy_bound"  # it trains; the other checks only ask


def by_name(cases):
    """Each as a parameter of a test; a large vocabulary takes long."""
    large = {True: pytest.mark.slow, False: ()}
    return [
        pytest.param(case, id=case.name, marks=large[case.vocab_size > 10_000])
        for case in cases
    ]


@pytest.mark.parametrize("case", by_name(BROKEN))
def test_broken_model_violates_its_property(case):
    assert MEASUREMENTS[case.check](case), case.sentence


@pytest.mark.slow
@pytest.mark.parametrize("case", by_name(c for c in BROKEN if c.only))
def test_nothing_else_is_broken(case):
    others = CHECKS - {case.check, SLOW}
    found = {check: MEASUREMENTS[check](case) for check in sorted(others)}
    assert not any(found.values()), found


@pytest.mark.parametrize("case", by_name(CORRECT))
def test_correct_model_holds_every_property(case):
    found = {c: MEASUREMENTS[c](case) for c in sorted(CHECKS - {SLOW})}
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("case", by_name(CORRECT))
def test_correct_model_learns_what_can_be_learnt(case):
    assert not MEASUREMENTS[SLOW](case)


def test_every_check_has_a_measurement_and_a_fault_of_its_own():
    assert set(MEASUREMENTS) == CHECKS
    assert {case.check for case in BROKEN} == CHECKS
    assert {case.check for case in BROKEN if case.only} == CHECKS


def test_there_are_enough_and_each_is_named_and_explained():
    assert len(BROKEN) >= 60
    assert len(CORRECT) >= 20
    for cases in (BROKEN, CORRECT):
        assert not [
            name
            for name, count in Counter(case.name for case in cases).items()
            if count > 1
        ]
    assert len({case.sentence for case in BROKEN}) == len(BROKEN)
    assert all(case.sentence.endswith(".") for case in BROKEN)


def test_builds_are_fresh():
    for case in (*BROKEN, *CORRECT):
        assert case.build() is not case.build(), case.name
