"""check_cache finds each convention, accuses none, and finds each fault."""

import re

import pytest
from cached_models import CONVENTIONS, FAULTS

from gpt_duet.invariants import check_model

pytestmark = [
    pytest.mark.usefixtures("one_layer"),
    pytest.mark.unhooked,
]
ROWS = [(kind, fault) for kind in CONVENTIONS for fault in kind.faults]
FIRST = {"position": 1, "mask": 1, "rows": 1, "twice": 1, "window": 6}


def checked(kind, fault=""):
    parts = {"fault": fault, "__module__": kind.__module__}
    model = type(kind.__name__, (kind,), parts)
    report = check_model(model, checks=["cache"], cache=kind.make_cache)
    return report.results[0]


@pytest.mark.parametrize("kind", CONVENTIONS)
def test_a_convention_is_found_and_not_accused(kind):
    result = checked(kind)
    assert result.status == "passed", result.message
    assert f"decoding: {kind.found}" in result.message


@pytest.mark.parametrize(("kind", "fault"), ROWS)
def test_a_fault_is_found_at_its_first_position(kind, fault):
    """With the piece, the module and its line."""
    result = checked(kind, fault)
    assert result.status == "failed", result.message
    if fault in FIRST and "generate" not in kind.found:
        words = rf"position {FIRST[fault]} of .* in the piece of 1 after"
        assert re.search(words, result.message), result.message
        place = r"first in (wpe|blocks|cell)\S* \(\w+\), \w+\.py:\d+$"
        assert re.search(place, result.message), result.message


def test_there_are_enough_conventions():
    assert len(CONVENTIONS) >= 12
    assert {fault for _, fault in ROWS} == FAULTS.keys()
