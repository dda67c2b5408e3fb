"""Builds what a plan names, and measures it."""

from gpt_duet.benchmark_results import Run

from .measure import measure
from .models import build_all
from .plan import Plan, Tell


def run_plan(plan: Plan, tell: Tell = lambda text: None) -> list[Run]:
    """Build everyone of a plan, test each, and time all in turn."""
    return measure(*build_all(plan, tell), tell)
