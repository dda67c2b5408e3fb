"""Select which rows of a test run on each push; all run every night."""

import pytest

PARAM = type(pytest.param())


def slow_unless(on_every_push, rows):
    """Return rows as parameters; mark those slow that `on_every_push` rejects.

    Slow rows do not run on each push.
    """
    found = []
    for row in rows:
        if not isinstance(row, PARAM):
            row = pytest.param(*(row if type(row) is tuple else (row,)))
        if not on_every_push(*row.values):
            marks = [*row.marks, pytest.mark.slow]
            row = pytest.param(*row.values, id=row.id, marks=marks)
        found.append(row)
    return found


def first_of(key, rows):
    """Return a function that says whether a row is the first with its key."""
    first = {}
    for row in rows:
        first.setdefault(key(*row), row)
    return lambda *row: first[key(*row)] == row
