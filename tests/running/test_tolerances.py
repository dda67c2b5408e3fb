"""All tolerances are in one file; each is used and names its unit."""

import re
import tokenize
from pathlib import Path

import pytest

from gpt_duet.running import tolerances

SHARED = Path(tolerances.__file__).parents[1]
HOME = Path(tolerances.__file__)
OTHERS = {f: f.read_text("utf-8") for f in SHARED.rglob("*.py") if f != HOME}
NAMES = [name for name in vars(tolerances) if name.isupper()]
COUNTED = [
    "UNITS?",
    "NOISES",
    "SHARES?",
    "SPREAD",
    "NATS",
    "FLOORS",
    "BOUNDS",
    "EXPONENT",
]
NOT_ZERO = {"1e-300"}  # no tolerance: the number avoids a division by 0


@pytest.mark.parametrize("name", NAMES)
def test_a_tolerance_is_used_and_defined_once(name):
    users = [
        f for f, text in OTHERS.items() if re.search(rf"\b{name}\b", text)
    ]
    assert users
    again = [f for f in users if re.search(rf"(?m)^{name}\b.* = ", OTHERS[f])]
    assert not again


@pytest.mark.parametrize("name", NAMES)
def test_a_tolerance_states_its_unit(name):
    assert re.search(rf"(^|_)({'|'.join(COUNTED)})(_|$)", name)


@pytest.mark.parametrize("room", ["running", "distributed"])
def test_small_numbers_are_in_no_other_file(room):
    found = []
    for file in (SHARED / room).rglob("*.py"):
        with file.open("rb") as opened:
            tokens = [*tokenize.tokenize(opened.readline)]
        found += [
            (file.name, *token.start, token.string)
            for token in tokens
            if token.type == tokenize.NUMBER and "e-" in token.string
            if file != HOME and token.string not in NOT_ZERO
        ]
    assert not found
