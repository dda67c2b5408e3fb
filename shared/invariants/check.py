"""A check: a function of a Subject, and how much time it may take."""

import inspect
from collections.abc import Callable
from functools import update_wrapper

from ..running.context import one_run
from ..running.errors import SkipCheck
from ..running.subject import Subject

__all__ = ["SkipCheck", "Subject", "check"]

Function = Callable[[Subject], str]


class Check:
    """A check: call it with a Subject.

    It returns a sentence about what was tried, raises AssertionError with
    one that names the property and the case that breaks it, or SkipCheck.

    Attributes:
        says: a sentence on what it checks.
        share: weight of the check when checks divide the time left; None: it
            is short, and may take all of it.
        slow: whether it runs only if it is named.
        implied_by: checks whose failure explains its own.
        needs: what it has to see, next to scores, that a program does not
            show.
    """

    def __init__(
        self,
        function: Function,
        share: float | None,
        slow: bool,
        implied_by: tuple[str, ...],
        needs: str,
    ):
        update_wrapper(self, function)
        self.name = function.__name__
        self.says = (inspect.getdoc(function) or self.name).split("\n")[0]
        self.share, self.slow, self.implied_by = share, slow, implied_by
        self.needs, self._function = needs, function

    @one_run
    def __call__(self, subject: Subject) -> str:
        """Run it."""
        if self.needs and subject.is_program:
            raise SkipCheck(f"a program has no {self.needs} here")
        return self._function(subject)


def check(
    *,
    share: float | None = None,
    slow: bool = False,
    implied_by: tuple[str, ...] = (),
    needs: str = "",
) -> Callable[[Function], Check]:
    """Decorate a function as a check; the arguments are those of Check."""
    return lambda function: Check(function, share, slow, implied_by, needs)
