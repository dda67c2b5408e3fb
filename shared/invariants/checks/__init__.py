"""The checks, each a function of a Subject, by the names of their reports.

A check returns a sentence about what was tried, raises AssertionError with
one that names the property and the case that breaks it, or SkipCheck.
"""

from collections.abc import Callable

from ..model.subject import Subject
from .cache import check_cache
from .causality import check_causality
from .context import (
    check_context_use,
    check_order_sensitivity,
    check_prefix_consistency,
)
from .gradients import check_causal_gradients, check_gradient_flow
from .limits import check_dtype, check_length_limit, check_vocabulary
from .loss import check_loss
from .outputs import (
    check_finite,
    check_initial_loss,
    check_normalised,
    check_shape,
)
from .rows import check_batch_independence
from .state import check_determinism, check_purity, check_state_dict
from .training import check_entropy_bound

Check = Callable[[Subject], str]

CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        check_shape,
        check_finite,
        check_causality,
        check_causal_gradients,
        check_prefix_consistency,
        check_batch_independence,
        check_order_sensitivity,
        check_context_use,
        check_determinism,
        check_purity,
        check_normalised,
        check_initial_loss,
        check_loss,
        check_gradient_flow,
        check_state_dict,
        check_dtype,
        check_length_limit,
        check_vocabulary,
        check_cache,
        check_entropy_bound,
    )
}

# Run only when they are named.
SLOW = frozenset({"check_entropy_bound"})

__all__ = ["CHECKS", "SLOW", "Check", *CHECKS]
