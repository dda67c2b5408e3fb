"""The names that `gpt_duet.invariants` gives."""

from .checks import CHECKS as CHECKS
from .dependence import Proof as Proof
from .errors import SkipCheck as SkipCheck
from .errors import UnusableModel as UnusableModel
from .influencing import influence as influence
from .meeting import meet as meet
from .moves.pictures import save_map as save_map
from .moves.pictures import text_map as text_map
from .parametrize import Target as Target
from .parametrize import parametrize_with_checks as parametrize_with_checks
from .proving import prove_causality as prove_causality
from .report import CheckResult as CheckResult
from .report import Report as Report
from .runner import check_model as check_model
from .scorer import check_scorer as check_scorer
from .subject import Subject as Subject
