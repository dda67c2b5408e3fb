"""Times styles, peers and the machine's limits, in the same shuffled rounds.

The clock and the order of a round are shared/comparison/timing.py's.
"""

from collections.abc import Callable
from typing import Any

from gpt_duet.comparison.benchmark_results import Row, Run
from gpt_duet.comparison.timing import interleave, stopwatch, time_first

from .machine import limits
from .plan import Plan, Tokens
from .profiling import peak_bytes, time_by_operation

Tell = Callable[[str], None]


class Rounds:
    """Rows to be, and how the time of each is taken."""

    def __init__(self, plan: Plan, tell: Tell):
        self._plan, self._tell = plan, tell
        self._facts: dict[str, dict[str, Any]] = {}
        self._watches: dict[str, Callable[[], float]] = {}

    def add(self, name: str, run: Callable[[], object], **facts: Any) -> None:
        """Add a row; it is run a few times for its memory and its profile."""
        self._tell(f"running {name}")
        device = self._plan.device
        if "first_seconds" not in facts:
            facts["first_seconds"] = time_first(run, device)
        facts["peak_bytes"] = peak_bytes(run, device)
        if self._plan.profile:
            facts["operations"] = time_by_operation(run, device)
        self._facts[name] = facts
        self._watches[name] = stopwatch(run, device)

    def measure(self, tokens: Tokens, notes: list[str]) -> Run:
        """Time all in shuffled rounds, on tokens that are drawn anew."""
        plan = self._plan
        for name, (run, facts) in limits(plan.dtypes[0], plan.device).items():
            self._facts[name] = {"limit": True, **facts}
            self._watches[name] = stopwatch(run, plan.device)

        def before(number: int) -> None:
            self._tell(f"round {number + 1} of {plan.rounds}")
            tokens.draw(number)

        seconds = interleave(self._watches, plan.rounds, before, plan.budget)
        rows = [
            Row(name, seconds[name], **facts)
            for name, facts in self._facts.items()
        ]
        setting = plan.setting(*tokens.ids.shape)
        return Run(plan.kind, setting, rows, plan.styles[-1], notes)
