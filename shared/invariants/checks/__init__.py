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

# In the order of the report: what others would stumble over comes first. And
# what each costs: calls, and forwards of the longest sequence, one row; a
# backward pass counts as two, and float64 doubles. Counted on two layers and
# 1,024 positions.
_CHECKS = {
    outputs.check_shape: (14, 2),
    outputs.check_finite: (40, 6),
    state.check_determinism: (42, 1),
    causality.check_causality: (600, 500),
    gradients.check_causal_gradients: (200, 150),
    context.check_prefix_consistency: (160, 20),
    rows.check_batch_independence: (250, 60),
    order.check_order_sensitivity: (14, 1),
    context.check_context_use: (24, 20),
    state.check_purity: (8, 2),
    outputs.check_normalised: (8, 0),
    outputs.check_initial_loss: (1, 1),
    signal.check_signal: (5, 0),
    loss.check_loss: (40, 0),
    gradients.check_gradient_flow: (3, 1),
    derivatives.check_gradients: (60, 1),
    state.check_state_dict: (5, 0),
    dtypes.check_dtype: (7, 1),
    limits.check_length_limit: (1, 1),
    limits.check_vocabulary: (15, 1),
    cache.check_cache: (200, 4),
    training.check_entropy_bound: (2400, 3000),
}
CHECKS: dict[str, Check] = {check.__name__: check for check in _CHECKS}
COSTS = {check.__name__: cost for check, cost in _CHECKS.items()}

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
