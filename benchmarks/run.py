"""Build the models of a plan, and measure them."""

from gpt_duet.benchmark_results import Run

from .measure import measure
from .models import build_all
from .plan import Plan, Tell


def run_plan(plan: Plan, tell: Tell = lambda text: None) -> list[Run]:
    """Build the models of a plan, test each, and time all in turn."""
    return measure(*build_all(plan, tell), tell)
