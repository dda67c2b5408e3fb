"""Define a check: a function of a Subject, with the time that it may take."""

import inspect
from collections.abc import Callable
from functools import update_wrapper

from ..running.context import one_run
from ..running.errors import SkipCheck
from ..running.subject import Subject

__all__ = ["SkipCheck", "Subject", "check"]

Function = Callable[[Subject], str]
BRIEF = 0.3  # weight of a check that needs only a few calls


class Check:
    """A check: call it with a Subject, the record of a model.

    A call returns a sentence about the tried cases. It raises SkipCheck, or an
    AssertionError whose sentence names a property, and a case that breaks it.

    Attributes:
        says: a sentence that says what the check requires.
        share: weight of the check when checks divide the remaining time. None
            means that the check is short, and may use all of this time.
        weight: weight with which earlier checks reserve time for this check.
            It equals `share` if that is set.
        slow: whether the check runs only if it is named.
        implied_by: checks whose failure explains a failure of this check.
        needs: what the check requires besides scores, such as weights. A
            program in another language does not have it.
    """

    def __init__(
        self,
        function: Function,
        share: float | None,
        slow: bool,
        implied_by: tuple[str, ...],
        needs: str,
        weight: float,
    ):
        update_wrapper(self, function)
        self.name = function.__name__
        self.says = (inspect.getdoc(function) or self.name).split("\n")[0]
        self.share, self.slow, self.implied_by = share, slow, implied_by
        self.weight = weight if share is None else share
        self.needs, self._function = needs, function

    @one_run
    def __call__(self, subject: Subject) -> str:
        """Run the check."""
        if self.needs and subject.is_program:
            raise SkipCheck(f"a program has no {self.needs} here")
        return self._function(subject)


def check(
    *,
    share: float | None = None,
    slow: bool = False,
    implied_by: tuple[str, ...] = (),
    needs: str = "",
    weight: float = BRIEF,
) -> Callable[[Function], Check]:
    """Decorate a function as a check; the arguments are those of Check."""
    return lambda function: Check(
        function, share, slow, implied_by, needs, weight
    )
