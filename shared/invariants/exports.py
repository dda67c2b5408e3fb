"""Import the names that `gpt_duet.invariants` offers."""

from ..proof import Proof as Proof
from ..running.errors import SkipCheck as SkipCheck
from ..running.errors import UnusableModel as UnusableModel
from ..running.meeting import meet as meet
from ..running.subject import Subject as Subject
from ..tracing.influencing import influence as influence
from ..tracing.pictures import save_map as save_map
from ..tracing.pictures import text_map as text_map
from .checks import CHECKS as CHECKS
from .guarding import guard as guard
from .parametrize import Target as Target
from .parametrize import parametrize_with_checks as parametrize_with_checks
from .proving import prove_causality as prove_causality
from .report import CheckResult as CheckResult
from .report import Report as Report
from .runner import check_model as check_model
