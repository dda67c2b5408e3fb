"""The checks, by their names, in the order of the report.

Those come first whose failure explains failures of others.
"""

from importlib import import_module

from ..check import Check

ORDER = (
    "shape finite determinism causality causal_gradients batch_independence "
    "prefix_consistency documents order_sensitivity context_use purity "
    "normalised initial_loss signal loss gradient_flow gradients state_dict "
    "dtype length_limit vocabulary cache entropy_bound"
)
CHECKS: dict[str, Check] = {
    f"check_{name}": getattr(
        import_module(f".{name}", __name__), f"check_{name}"
    )
    for name in ORDER.split()
}
