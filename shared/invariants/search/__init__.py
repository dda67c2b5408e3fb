"""How leaks are looked for, told from rounding, and traced.

    leaks.py             pairs of sequences that are equal up to a split
    trial.py             what such a search tries and finds
    tolerance.py         which difference is a leak, and which is rounding
    affordable.py        which splits are tried where time is short
    larger_weights.py    copies in which a leak can no longer hide
    smallest_case.py     the failure's sentence: its smallest case
    first_difference.py  the first module that shows it
    influence.py         which position depends on which

The checks of ../checks say in which modes and lengths to search.
"""
