"""The checks, by their names, in the order of the report.

Those come first whose failure explains failures of others.
"""

import difflib
from collections.abc import Collection, Mapping

from .batch_independence import check_batch_independence
from .cache import check_cache
from .causal_gradients import check_causal_gradients
from .causality import check_causality
from .context_use import check_context_use
from .determinism import check_determinism
from .documents import check_documents
from .dtype import check_dtype
from .entropy_bound import check_entropy_bound
from .finite import check_finite
from .gradient_flow import check_gradient_flow
from .gradients import check_gradients
from .initial_loss import check_initial_loss
from .length_limit import check_length_limit
from .loss import check_loss
from .normalised import check_normalised
from .order_sensitivity import check_order_sensitivity
from .prefix_consistency import check_prefix_consistency
from .purity import check_purity
from .shape import check_shape
from .signal import check_signal
from .state_dict import check_state_dict
from .vocabulary import check_vocabulary

CHECKS = {
    check.name: check
    for check in (
        check_shape,
        check_finite,
        check_determinism,
        check_causality,
        check_causal_gradients,
        check_batch_independence,
        check_prefix_consistency,
        check_documents,
        check_order_sensitivity,
        check_context_use,
        check_purity,
        check_normalised,
        check_initial_loss,
        check_signal,
        check_loss,
        check_gradient_flow,
        check_gradients,
        check_state_dict,
        check_dtype,
        check_length_limit,
        check_vocabulary,
        check_cache,
        check_entropy_bound,
    )
}


def choose_checks(names: Collection[str] | None) -> list[str]:
    """Return full names of checks, in the order of the list.

    Args:
        names: with or without "check_"; None: all but the slow one.

    Raises:
        ValueError: for an unknown name, with those known.
    """
    if names is None:
        return [name for name, c in CHECKS.items() if not c.slow]
    if isinstance(names, str):
        names = [names]
    full = {n if n.startswith("check_") else f"check_{n}" for n in names}
    unknown = sorted(full - CHECKS.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], CHECKS)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"unknown check {', '.join(unknown)}{hint or '; known: '}"
            f"{'' if hint else ', '.join(CHECKS)}"
        )
    return [name for name in CHECKS if name in full]


def full_names(reasons: Mapping[str, str] | None) -> dict[str, str]:
    """Return reasons by the full names of checks.

    Raises:
        ValueError: for an unknown name.
    """
    return {choose_checks([n])[0]: why for n, why in (reasons or {}).items()}
