"""Checks every annotation at run time, shapes and all, for --check-shapes."""

import typer
from beartype import BeartypeConf, FrozenDict, beartype

# a whole number passes for a float here, as it does for type checkers; and
# what a command gets as its typer.Context is of a class above that one
check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=FrozenDict({typer.Context: typer.Context.__base__}),
    )
)
