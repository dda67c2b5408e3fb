"""A mode that sees each operation that PyTorch runs."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Base of what sees each operation inside.

    Nothing is compiled there: dynamo, which would take a second, stays out.
    """

    # flex_attention and its like: each runs as one operation
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
