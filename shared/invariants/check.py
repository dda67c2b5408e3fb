"""A check: a function, and the calls and time it needs."""

from collections.abc import Callable
from functools import update_wrapper

from .budget import Budget
from .context import one_run
from .costs import Needs, Round
from .errors import SkipCheck
from .subject import Subject

__all__ = ["Budget", "Round", "SkipCheck", "Subject", "check"]

Function = Callable[[Subject, Budget], str]


class Check:
    """A check: call it with a subject and a budget.

    It returns a sentence about what was tried, raises AssertionError with
    one that names the property and the case that breaks it, or SkipCheck.
    """

    def __init__(self, function: Function, needs: Needs):
        update_wrapper(self, function)
        self.name = function.__name__
        self.needs = needs
        self._function = function

    @one_run
    def __call__(self, subject: Subject, budget: Budget) -> str:
        """Run it."""
        return self._function(subject, budget)


def check(
    *,
    calls: int,
    rows: int,
    copies: int = 2,
    share: int = 0,
    slow: bool = False,
    implied_by: tuple[str, ...] = (),
) -> Callable[[Function], Check]:
    """Decorate a function as a check; the arguments are those of Needs."""
    needs = Needs(calls, rows, copies, share, slow, implied_by)
    return lambda function: Check(function, needs)
