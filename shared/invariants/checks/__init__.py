"""The checks, each a function of a Subject, by the names of their reports.

A check returns a sentence about what was tried, raises AssertionError with
one that names the property and the case that breaks it, or SkipCheck.
"""

from collections.abc import Callable

from ..model.subject import Subject
from . import (
    cache,
    causality,
    context,
    derivatives,
    gradients,
    limits,
    loss,
    outputs,
    rows,
    state,
    training,
)

Check = Callable[[Subject], str]

# In the order of the report: what others would stumble over comes first.
CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        outputs.check_shape,
        outputs.check_finite,
        state.check_determinism,
        causality.check_causality,
        gradients.check_causal_gradients,
        context.check_prefix_consistency,
        rows.check_batch_independence,
        context.check_order_sensitivity,
        context.check_context_use,
        state.check_purity,
        outputs.check_normalised,
        outputs.check_initial_loss,
        loss.check_loss,
        gradients.check_gradient_flow,
        derivatives.check_gradients,
        state.check_state_dict,
        limits.check_dtype,
        limits.check_length_limit,
        limits.check_vocabulary,
        cache.check_cache,
        training.check_entropy_bound,
    )
}

# What a check costs, in forwards of the longest sequence, one row; 50 where
# it is not named. Measured on four layers, 128 wide, 256 tokens.
FORWARDS = {
    "check_causality": 900,
    "check_causal_gradients": 300,
    "check_prefix_consistency": 75,
    "check_batch_independence": 350,
    "check_context_use": 120,
    "check_cache": 120,
    "check_gradients": 5,
    "check_entropy_bound": 60_000,
}

# What fails where another check has failed, by the same cause.
IMPLIED = {
    "check_causal_gradients": "check_causality",
    "check_prefix_consistency": "check_causality",
}

# Run only when they are named.
SLOW = frozenset({"check_entropy_bound"})
