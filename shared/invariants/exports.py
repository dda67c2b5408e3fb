"""The names that `gpt_duet.invariants` gives."""

from .checks import CHECKS
from .dependence import Proof
from .errors import SkipCheck, UnusableModel
from .influencing import influence
from .meeting.meet import meet
from .moves.pictures import save_map, text_map
from .parametrize import Target, parametrize_with_checks
from .proving import prove_causality
from .report import CheckResult, Report
from .runner import check_model
from .scorer import check_scorer
from .subject import Subject

__all__ = [
    "CHECKS",
    "CheckResult",
    "Proof",
    "Report",
    "SkipCheck",
    "Subject",
    "Target",
    "UnusableModel",
    "check_model",
    "check_scorer",
    "influence",
    "meet",
    "parametrize_with_checks",
    "prove_causality",
    "save_map",
    "text_map",
]
