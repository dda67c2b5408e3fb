"""Check all annotations at run time, also their shapes (--check-shapes)."""

from random import Random

import typer
from beartype import BeartypeConf, FrozenDict, beartype
from beartype._check.code import codemain

# beartype draws a random item of each list that it checks. The kit reports a
# model that draws from Python's generator, so beartype must use another one.
assert codemain.getrandbits, "beartype draws in another place now"
codemain.getrandbits = Random(0).getrandbits

# An int counts as a float, as in type checkers. Commands get an instance of
# the base class of typer.Context, so accept the base class.
check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=FrozenDict({typer.Context: typer.Context.__base__}),
    )
)
