"""Checks every annotation at run time, shapes and all, for --check-shapes."""

from beartype import BeartypeConf, beartype

# a whole number passes for a float here, as it does for type checkers
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
