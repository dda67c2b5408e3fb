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
    dtypes,
    gradients,
    limits,
    loss,
    order,
    outputs,
    rows,
    signal,
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
        order.check_order_sensitivity,
        context.check_context_use,
        state.check_purity,
        outputs.check_normalised,
        outputs.check_initial_loss,
        signal.check_signal,
        loss.check_loss,
        gradients.check_gradient_flow,
        derivatives.check_gradients,
        state.check_state_dict,
        dtypes.check_dtype,
        limits.check_length_limit,
        limits.check_vocabulary,
        cache.check_cache,
        training.check_entropy_bound,
    )
}

# What a check costs: calls, and forwards of the longest sequence, one row;
# a backward pass counts as two, and float64 doubles. Counted on two layers
# and 1,024 positions.
COSTS = {
    "check_shape": (14, 2),
    "check_finite": (40, 6),
    "check_determinism": (42, 1),
    "check_causality": (600, 500),
    "check_causal_gradients": (200, 150),
    "check_prefix_consistency": (160, 20),
    "check_batch_independence": (250, 60),
    "check_order_sensitivity": (14, 1),
    "check_context_use": (24, 20),
    "check_purity": (8, 2),
    "check_normalised": (8, 0),
    "check_initial_loss": (1, 1),
    "check_signal": (5, 0),
    "check_loss": (40, 0),
    "check_gradient_flow": (3, 1),
    "check_gradients": (60, 1),
    "check_state_dict": (5, 0),
    "check_dtype": (7, 1),
    "check_length_limit": (1, 1),
    "check_vocabulary": (15, 1),
    "check_cache": (200, 4),
    "check_entropy_bound": (2400, 3000),
}

# What is done to all weights, in copies of the model; 2 where not named.
COPIES = {"check_finite": 10, "check_gradients": 20, "check_state_dict": 15}

# Those that ask for time as they go, and the share that each gets of it.
SHARES = {
    "check_causality": 6,
    "check_causal_gradients": 1,
    "check_prefix_consistency": 1,
    "check_batch_independence": 1,
    "check_context_use": 1,
    "check_cache": 1,
}

# What fails where another check has failed, by the same cause.
IMPLIED = {
    "check_causal_gradients": ("check_causality",),
    "check_prefix_consistency": ("check_determinism", "check_causality"),
}

# Run only when they are named.
SLOW = frozenset({"check_entropy_bound"})
