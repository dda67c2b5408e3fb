"""Checks that tell whether a decoder-only language model is one.

from gpt_duet import check_model
print(check_model(lambda: MyGPT(config), vocab_size=65, block_size=64))
"""

from .checks import CHECKS
from .dependence import Proof
from .errors import SkipCheck, UnusableModel
from .influence import influence
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
