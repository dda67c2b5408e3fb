"""List the checks by name, in the order of the report.

If a failure of one check makes other checks fail, that check comes first. A
new check also needs a measurement in tests/oracle/measurements.py, a broken
model that only it finds in tests/zoo/broken_models.py, its cases in `CASES` of
shared/running/ways.py, and rows in README.md and docs/explanation/time.md.
"""

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
